"""Sizes as a model's code reads and writes them: what torch has filled in or forgotten where an operation is seen.

``x.shape`` has a piece's sizes. They may say how many elements there are, which is so on this rank; as a number to compute with,
as in ``x.sum(1) / x.shape[1]``, they would be those of the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshfold.mesh.tracking.dims import Dims, axes_of, is_split
from meshfold.mesh.tracking.follow import Tracker
from meshfold.mesh.tracking.places import from_the_front

_LIBRARIES = ("meshfold", "torch", "transformers", "einops", "numba", "triton", "peft")
"""Whose code is given plain sizes."""
_UNFLATTEN = (torch.Tensor.unflatten, torch.unflatten)
_SHAPE: Any = torch.Tensor.shape
_COMPUTES = frozenset(
    f"{front}{name}" for name in ("add", "sub", "mul", "div", "truediv", "pow") for front in ("", "r", "i")
) | {"multiply", "divide", "true_divide", "subtract"}


class LocalSize(int):
    """The size of a split dim: a number of elements, and nothing to divide by."""

    refuse: Callable[[], NoReturn]

    def __truediv__(self, other: Any) -> Any:
        self.refuse()

    def __rtruediv__(self, other: Any) -> Any:
        self.refuse()

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        self.refuse()

    def __float__(self) -> float:
        self.refuse()

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)


class OpenSizes(TorchFunctionMode):
    """Marks the sizes of split dims in a model's own code, and notes which size of an ``unflatten`` is open."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _UNFLATTEN and not self._tracker.flat:
            return self._unflatten(func, args, kwargs)
        if func == _SHAPE.__get__ or func is Tensor.size:
            return self._sizes(args[0], func(*args, **kwargs), args[1:] or tuple(kwargs.values()))
        name = str(getattr(func, "__name__", "")).strip("_")
        if name in _COMPUTES:
            for value in (*args, *kwargs.values()):
                if isinstance(value, LocalSize):
                    value.refuse()
        if self._tracker.flat and args and _asked_by_the_model(2):
            self._check_places(name, args, kwargs)
        return func(*args, **kwargs)

    def _check_places(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
        if not isinstance(first, Tensor) or first.dim() != 2:
            return
        rows = self._tracker.dims(first)[0]
        if is_split(rows) and (number := from_the_front(name, args, kwargs)):
            axes = axes_of(rows)
            self._tracker.refuse(
                name,
                f"counts dim {number} from the front, where the stream has no dims of batch and sequence: its tokens are flat, and "
                f"split over {', '.join(axes)}",
                first,
                axes=axes,
            )

    def _unflatten(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(("self", "dim", "sizes"), args, strict=False)), **kwargs}
        sizes = [int(size) for size in given["sizes"]]
        if -1 in sizes and isinstance(given["dim"], int):
            self._tracker.inferred = given["dim"] % args[0].dim() + sizes.index(-1)
        try:
            return func(*args, **kwargs)
        finally:
            self._tracker.inferred = None

    def _sizes(self, x: Tensor, found: Any, asked: tuple[Any, ...]) -> Any:
        if not _asked_by_the_model(3):
            return found
        dims = self._tracker.dims(x)
        if not any(map(is_split, dims)):
            return found
        if isinstance(found, int):
            return self._marked(dims, asked[0] % x.dim(), found) if isinstance(asked[0], int) else found
        return torch.Size([self._marked(dims, place, size) for place, size in enumerate(found)])

    def _marked(self, dims: Dims, place: int, size: int) -> int:
        if not is_split(dims[place]):
            return size
        made = LocalSize(size)
        axes = axes_of(dims[place])

        def refuse() -> NoReturn:
            self._tracker.refuse(
                "size",
                f"computes with the size of dim {place}, of which a rank has a piece, split over {', '.join(axes)}",
                axes=axes,
            )

        made.refuse = refuse
        return made


def _asked_by_the_model(up: int) -> bool:
    """Whether the line so many frames up is outside of known libraries."""
    frame: FrameType | None = sys._getframe(up)
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or _is_between(frame)):
        frame = frame.f_back  # of another mode, which hands on what it does not answer
    if frame is None:
        return False
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES


def _is_between(frame: FrameType) -> bool:
    """Whether it is one that torch puts round the code of modes."""
    return str(frame.f_globals.get("__name__", "")) in (
        "torch._compile",
        "torch._dynamo.eval_frame",
        "torch.overrides",
    )
