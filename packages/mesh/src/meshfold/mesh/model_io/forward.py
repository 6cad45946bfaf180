"""A model's forward: eval mode for a block of code, and the tensors of an output, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Change = Callable[[str, Tensor], Tensor]
"""of a tensor's name in the output, and the tensor"""


def map_tensors(output: Any, change: Change, *, deep: bool = False, name: str = "output") -> Any:
    """Return a model's output with its tensors changed: a tensor, a tuple or list, a mapping or an object with attributes.

    Args:
        output: a mapping or an object is changed in place.
        change: is given names such as ``output.logits`` and ``output[1]``.
        deep: those in tuples and lists inside too.
        name: of the output.
    """
    if isinstance(output, Tensor):
        return change(name, output)

    def inner(place: str, value: Any) -> Any:
        if isinstance(value, Tensor) or (deep and isinstance(value, tuple | list)):
            return map_tensors(value, change, deep=deep, name=place)
        return value

    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(
            *(inner(f"{name}.{field}", value) for field, value in zip(output._fields, output, strict=True))
        )
    if isinstance(output, tuple | list):
        return type(output)(inner(f"{name}[{place}]", value) for place, value in enumerate(output))
    if isinstance(output, Mapping):
        for key, value in output.items():
            if (made := inner(f"{name}.{key}", value)) is not value:
                output[key] = made  # type: ignore[index]
    else:
        for key, value in getattr(output, "__dict__", {}).items():
            if (made := inner(f"{name}.{key}", value)) is not value:
                object.__setattr__(output, key, made)  # it may be a frozen dataclass
    return output


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: put the model in eval mode, then give each module the mode back that it had."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
