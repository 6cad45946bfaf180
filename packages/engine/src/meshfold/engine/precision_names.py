"""Other libraries' names of precisions, for messages that suggest ours. Imports nothing: the command line uses it before torch."""

from __future__ import annotations

OTHER_NAMES = {
    "float16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    "f16": "fp16",
    "bfloat16": "bf16",
    "bfloat": "bf16",
    "bf16-mixed": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "single": "fp32",
    "full": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "f32": "fp32",
    "tf32": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "64": "fp64",
    "64-true": "fp64",
    "f64": "fp64",
}


def precision_name(name: object) -> str:
    """Return our name for a precision written in another way, such as ``torch.float16`` or ``"half"``; "" if it is none."""
    return OTHER_NAMES.get(str(name).removeprefix("torch.").casefold(), "")
