"""The tensors behind an out-of-memory error: what was asked for, in which line, and what was alive there."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters import uncompiled_name
from meshfold.mesh.spec import format_bytes, parse_bytes

_ASKED = re.compile(r"Tried to allocate ([\d.]+ [GM]iB)")
_INSIDE = ("torch", "meshfold")
_CLOSE = 0.005
"""Share by which a size in a message, which has two digits behind the point, may be off."""
_NAMED = 3
_WORTH_NAMING = 0.05
"""Share of the largest tensor below which another one is not named."""


def describe(error: BaseException, model: nn.Module, tokens: int) -> str:
    """Say which tensors did not fit, as far as the error tells.

    Args:
        error: raised for want of memory.
        model: what was run.
        tokens: of the forward, to recognise the output of one of its layers by its size.

    Returns:
        Sentences that begin with the bytes asked for. Empty if nothing is known.
    """
    asked, frame = bytes_asked(error), _line_of_user(error)
    words = []
    if asked:
        made = _outputs_of(asked, model, tokens)
        words.append(
            f"The allocation that failed: {format_bytes(asked)}{f', the size of {made}' if made else ''}."
        )
    if frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(file, line).strip()
        words.append(f"It was made at {file}:{line}{f': {text}' if text else ''}.")
    alive = _largest(error)
    if alive:
        words.append(f"The largest tensors in use there: {', '.join(alive)}.")
    return " ".join(words)


def bytes_asked(error: BaseException) -> int:
    """Return the bytes of the allocation that failed; 0 if the message does not say."""
    found = _ASKED.search(str(error))
    return parse_bytes(found[1]) if found else 0


def _outputs_of(asked: int, model: nn.Module, tokens: int) -> str:
    """Name a linear layer whose output, or its gradient, has the size that was asked for."""
    for name, module in model.named_modules():
        features = getattr(module, "out_features", None)
        if not isinstance(features, int) or not tokens:
            continue
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            bytes_ = tokens * features * dtype.itemsize
            if abs(bytes_ - asked) <= _CLOSE * asked:
                kind = str(dtype).removeprefix("torch.")
                return f"{tokens:,} tokens × {features:,} outputs of {uncompiled_name(name)!r} in {kind}"
    return ""


def _line_of_user(error: BaseException) -> FrameType | None:
    """Return the innermost frame of code that is neither torch's nor ours."""
    found = None
    for frame in _frames(error):
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in _INSIDE:
            found = frame
    return found


def _largest(error: BaseException) -> list[str]:
    """Describe the largest tensors that local variables of the model's code hold, each storage once."""
    seen: dict[int, tuple[int, str]] = {}
    for frame in _frames(error):
        for name, tensor in _tensors(frame.f_locals):
            storage = tensor.untyped_storage()
            kind = str(tensor.dtype).removeprefix("torch.")
            shape = " × ".join(f"{n:,}" for n in tensor.shape)
            described = f"{name} ({shape}, {kind}, {format_bytes(storage.nbytes())})"
            seen.setdefault(storage._cdata, (storage.nbytes(), described))
    ordered = sorted(seen.values(), reverse=True)[:_NAMED]
    return [text for count, text in ordered if count >= _WORTH_NAMING * ordered[0][0] and count >= 2**20]


def _frames(error: BaseException) -> Iterator[FrameType]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame


def _tensors(values: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.device.type != "meta" and not isinstance(value, nn.Parameter):
            yield name, value
