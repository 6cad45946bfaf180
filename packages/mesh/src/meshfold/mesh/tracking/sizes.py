"""Sizes as a model's code reads and writes them, which torch has filled in or dropped by the time it dispatches an operation.

``x.shape`` has a piece's sizes. They may say how many elements this rank has. As numbers in a computation, such as ``x.sum(1) /
x.shape[1]``, they would have to be the whole tensor's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshfold.mesh.errors import LayoutError, MeshfoldError
from meshfold.mesh.tracking.call import at_dim, tensors_in
from meshfold.mesh.tracking.composite import UNFLATTEN, check_length, check_slices, followed
from meshfold.mesh.tracking.dims import (
    Dim,
    Dims,
    Factor,
    MixesError,
    Split,
    axes_of,
    is_split,
    is_whole,
    normal,
)
from meshfold.mesh.tracking.follow import Tracker, check_gradients
from meshfold.mesh.tracking.local_size import (
    LocalSize,
    dim_of,
    dims_of,
    local_size,
    local_sizes_in,
    sizes_given,
)
from meshfold.mesh.tracking.size_source import counts_from_front, dim_from_front, meets_float

_LIBRARIES = ("meshfold", "torch", "transformers", "einops", "numba", "triton", "peft")
"""Whose code is given plain sizes."""
_UNFLATTEN = (torch.Tensor.unflatten, torch.unflatten)
_SHAPE: Any = torch.Tensor.shape
_SHAPES = frozenset((_SHAPE.__get__, Tensor.size))
_COUNT = frozenset((Tensor.numel, Tensor.nelement, torch.numel))
_METHODS = "untyped_storage stride storage_offset dim is_contiguous is_complex is_floating_point data_ptr element_size"
_PROPERTIES = (
    "dtype device requires_grad ndim layout is_leaf is_meta is_cuda is_cpu is_sparse is_quantized is_nested grad_fn"
)
_READS = frozenset(
    [getattr(Tensor, name) for name in _METHODS.split()]
    + [getattr(Tensor, name).__get__ for name in _PROPERTIES.split()]
)
"""Functions that, of a tensor alone, tell neither sizes nor values: most calls there are, and nothing to track."""
_SIZED = (
    "view reshape expand broadcast_to unflatten flatten permute transpose movedim unsqueeze squeeze select narrow slice getitem "
    "split split_with_sizes tensor_split chunk unbind repeat tile repeat_interleave roll diagonal tril triu topk resize "
    "as_strided unfold fold pad layer_norm rms_norm group_norm interpolate upsample zeros ones empty rand randn full randint "
    "new_zeros new_ones new_empty new_full arange tril_indices triu_indices max_pool1d max_pool2d avg_pool1d avg_pool2d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d cat stack set_data"
)
_TAKE_SIZES = frozenset(_SIZED.split())
"""Functions of torch in which an integer is a size, a place or a dim, and none of the values."""
_NEWS = "zeros ones empty rand randn full randint new_zeros new_ones new_empty new_full"
_NEW = frozenset(_NEWS.split())
_SLICES = dict(
    getitem=(),
    setitem=(),
    narrow=("dim", "start", "length"),
    split=("length", "dim"),
    chunk=("chunks", "dim"),
)
_DRAWN = (
    "rand randn randint randperm bernoulli normal uniform exponential multinomial poisson random geometric cauchy log_normal "
    "gumbel_softmax rrelu alpha_dropout feature_dropout feature_alpha_dropout rand_like randn_like randint_like"
)
_RANDOM = frozenset(_DRAWN.split())
"""Operations that draw from torch's generators; nn.Dropout and F.dropout have their own random numbers."""
_SPREAD = frozenset(("expand", "broadcast_to"))
_FAILS = (RuntimeError, IndexError, ValueError, TypeError)
"""Errors that torch raises where shapes do not fit."""


class OpenSizes(TorchFunctionMode):
    """Marks the sizes of split dims in a model's own code, and notes which size of an ``unflatten`` is open."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS and len(args) == 1 and not kwargs:
            return func(*args)
        if func in _SHAPES:
            return self._sizes(args[0], func(*args, **kwargs), args[1:] or tuple(kwargs.values()))
        if func in _COUNT:
            return self._count(args[0], func(*args, **kwargs))
        tracker = self._tracker
        if tracker.is_off:
            return func(*args, **kwargs)
        name = str(getattr(func, "__name__", "")).strip("_")
        sizes = [*local_sizes_in(args), *(local_sizes_in(tuple(kwargs.values())) if kwargs else ())]
        if sizes:
            self._check_values(name, args, kwargs, sizes)
        if tracker.flat and args and _asked_by_the_model(2):
            self._check_places(name, args, kwargs)
        if tracker.random_axes and name in _RANDOM and _asked_by_the_model(2):
            self._check_random(name, args, kwargs, sizes)
        try:
            if (one := followed(func, args, kwargs, tracker.dims)) is not None:
                return tracker.as_one(name, *one, lambda: func(*args, **kwargs))
            if func in _UNFLATTEN and not tracker.flat:
                return self._unflatten(func, args, kwargs)
            if name in _SLICES and args and isinstance(args[0], Tensor) and _asked_by_the_model(2):
                self._check_slices(name, args, kwargs)
            with tracker.asking(self._view_sizes(name, args, kwargs)):
                out = func(*args, **kwargs)
        except _FAILS as error:
            self._refuse_failed(name, args, kwargs, error)
            raise
        for one_out in tensors_in(out):
            tracker.records.name(one_out)
        if sizes and isinstance(out, Tensor):
            self._made(name, args, kwargs, out)
        if sizes:
            self._cut(name, args, kwargs, out)
        return out

    def _check_random(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: list[LocalSize]) -> None:
        """Refuse to draw from a generator whose state may differ between ranks with the same data.

        A generator passed by the model is fine for whole tensors: all ranks draw the same numbers.
        """
        tracker, given = self._tracker, [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        pieces = sizes or any(not is_whole(dim) for x in given for dim in tracker.dims(x))
        if kwargs.get("generator") is not None and not pieces:
            return
        tracker.refuse(
            name,
            f"draws random numbers that differ between ranks along {', '.join(tracker.random_axes)}. Draw them outside the "
            "model and pass them to its forward, or draw whole tensors from a torch.Generator with the same seed on every rank; "
            "nn.Dropout and F.dropout are already the same on all ranks",
            *given,
            axes=tracker.random_axes,
        )

    def _check_slices(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, dims = args[0], self._tracker.dims(args[0])
        if not any(map(is_split, dims)):
            return
        try:
            if name in ("getitem", "setitem"):
                check_slices(dims, args[1], lambda number: isinstance(number, LocalSize))
                return
            given = {**dict(zip(_SLICES[name], args[1:], strict=False)), **kwargs}
            number, length = given.get("dim", 0) % x.dim(), given.get("length")
            if is_split(dims[number]) and given.get("chunks", 0) > x.shape[number]:
                raise at_dim("splits into more parts than a rank has elements of", number, dims[number])
            if isinstance(length, int) and not isinstance(length, LocalSize):
                start = given.get("start", 0)
                check_length(dims, number, 0 if isinstance(start, Tensor) else start, length)
        except MixesError as error:
            axes = tuple(axis for dim in dims for axis in axes_of(dim))
            self._tracker.refuse(name, str(error), x, axes=axes)

    def _view_sizes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
        """Return the sizes of a view as the model's code wrote them; other code has plain numbers."""
        if name not in ("view", "reshape") or not _asked_by_the_model(3):
            return None
        return sizes_given("", args, kwargs)

    def _refuse_failed(self, name: str, args: Any, kwargs: dict[str, Any], error: Exception) -> None:
        """Refuse an operation that fails on a shard, and quote its line; in one process it might succeed."""
        if isinstance(error, MeshfoldError | torch.OutOfMemoryError | torch._C._DistError):
            return
        if "modified inplace" in str(error):  # not about sizes: torch's message says what to change
            return
        given = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        pieces = [x for x in given if not all(map(is_whole, self._tracker.dims(x)))]
        local = [*local_sizes_in(args), *local_sizes_in(tuple(kwargs.values()))]
        if not pieces and not local:
            return
        found = [axes_of(dim) for x in pieces for dim in self._tracker.dims(x)] + [size.axes for size in local]
        axes = tuple(dict.fromkeys(axis for some in found for axis in some))
        over = f"split over {', '.join(axes)}" if axes else "that may be split"
        text = " ".join(str(error).split()) or type(error).__name__
        try:
            self._tracker.refuse(name or "a function", f"fails on a shard, {over} ({text})", *given, axes=axes)
        except LayoutError as refused:
            raise refused from error

    def _check_values(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: list[LocalSize]) -> None:
        """Refuse a local size as a value that a function computes with."""
        values: list[LocalSize] = []
        if name == "setitem":
            values = [*local_sizes_in(args[2:])]
        elif name in ("full", "new_full"):
            values = [*local_sizes_in(args[-1:] if not isinstance(args[-1], list | tuple) else ())]
            values += local_sizes_in(kwargs.get("fill_value"))
        elif name == "pad":
            values = [*local_sizes_in(args[3:]), *local_sizes_in(kwargs.get("value"))]
        elif name not in _TAKE_SIZES:
            values = sizes
        if values:
            values[0].refuse()

    def _made(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """Set the layout of a new tensor that was created with local sizes."""
        tracker, rank = self._tracker, out.dim()
        if name == "arange":
            found = [*local_sizes_in(args), *local_sizes_in(tuple(kwargs.values()))]
            axes = tuple(dict.fromkeys(axis for size in found for axis in size.axes))
            tracker.mark(out, ((Factor(out.shape[0], Split(axes, "counted")),),))
        elif name in _NEW:
            asked = sizes_given(name, args, kwargs)
            if asked is not None and len(asked) == rank:
                tracker.mark(out, dims_of(asked))
        elif name in _SPREAD and len(spread := sizes_given("", args, kwargs) or []) == rank:
            dims = list(tracker.dims(out))
            for place, size in enumerate(spread):
                before = place - rank + args[0].dim()
                if isinstance(size, LocalSize) and (
                    before < 0 or (args[0].shape[before] == 1 and is_whole(dims[place]))
                ):
                    dims[place] = dim_of(size)
            check_gradients(tracker, name, [args[0]], [tuple(dims)], out)
            tracker.records.name(out, tuple(dims))

    def _cut(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Mark where a whole tensor was cut to a local size: every rank then has the same first elements."""
        if name not in ("getitem", "narrow", "split"):
            return
        x: Tensor = args[0]
        if name == "getitem":
            cuts = list(_sliced(x.dim(), args[1]))
        else:
            given = {**dict(zip(_SLICES[name], args[1:], strict=False)), **kwargs}
            number = given.get("dim", 0) % x.dim()
            cuts = [(number, number, given.get("length", given.get("split_size")))]
        tracker = self._tracker
        for one in tensors_in(out):
            dims = list(tracker.dims(one))
            for before, after, index in cuts:
                axes = tuple(dict.fromkeys(axis for size in local_sizes_in(index) for axis in size.axes))
                if axes and is_whole(tracker.dims(x)[before]) and one.shape[after] < x.shape[before]:
                    dims[after] = (Factor(one.shape[after], Split(axes, "counted")),)
            if any(map(is_split, dims)):
                tracker.mark(one, tuple(dims))

    def _check_places(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
        if not isinstance(first, Tensor) or first.dim() != 2:
            return
        if is_split(self._tracker.dims(first)[0]) and (number := dim_from_front(name, args, kwargs)):
            self._refuse_place(first, name, f"dim {number}")

    def _refuse_place(self, x: Tensor, name: str, what: str) -> NoReturn:
        axes = axes_of(self._tracker.dims(x)[0])
        self._tracker.refuse(
            name,
            f"counts {what} from the front, where the stream has no dims of batch and sequence: its tokens are flat, and "
            f"split over {', '.join(axes)}",
            x,
            axes=axes,
        )

    def _unflatten(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(("self", "dim", "sizes"), args, strict=False)), **kwargs}
        sizes = [int(size) for size in given["sizes"]]
        if -1 in sizes and isinstance(given["dim"], int):
            self._tracker.inferred = given["dim"] % args[0].dim() + sizes.index(-1)
        try:
            if (one := UNFLATTEN[func](self._tracker.dims, *args, **kwargs)) is not None:
                return self._tracker.as_one("unflatten", *one, lambda: func(*args, **kwargs))
            return func(*args, **kwargs)
        finally:
            self._tracker.inferred = None

    def _sizes(self, x: Tensor, found: Any, asked: tuple[Any, ...]) -> Any:
        dims = self._tracker.dims(x)
        if not any(map(is_split, dims)) or (frame := _asking(3)) is None:
            return found
        if self._tracker.flat and x.dim() == 2 and is_split(dims[0]) and counts_from_front(frame, 2):
            self._refuse_place(x, "size", "a dim")
        split = [place for place, dim in enumerate(dims) if is_split(dim)]
        if asked and isinstance(asked[0], int):
            split = [place for place in split if place == asked[0] % x.dim()]
        if split and meets_float(frame, split, x.dim()):
            self._refuse_size(dims[split[0]], f"the size of dim {split[0]}")
        if isinstance(found, int):
            return self._marked(dims, asked[0] % x.dim(), found) if isinstance(asked[0], int) else found
        return torch.Size([self._marked(dims, place, size) for place, size in enumerate(found)])

    def _marked(self, dims: Dims, place: int, size: int) -> int:
        if not is_split(dims[place]):
            return size
        return self._local(size, dims[place], f"the size of dim {place}")

    def _count(self, x: Tensor, found: int) -> int:
        dims = self._tracker.dims(x)
        if not any(map(is_split, dims)) or (frame := _asking(3)) is None:
            return found
        dim, what = normal(factor for dim in dims for factor in dim), "the number of elements"
        if meets_float(frame, range(x.dim()), max(x.dim(), 1)):
            self._refuse_size(dim, what)
        return self._local(found, dim, what)

    def _refuse_size(self, dim: Dim, what: str) -> NoReturn:
        axes = axes_of(dim)
        over = f"split over {', '.join(axes)}"
        self._tracker.refuse("size", f"computes with {what}, of which a rank has a shard, {over}", axes=axes)

    def _local(self, size: int, dim: Dim, what: str) -> int:
        return local_size(size, axes_of(dim), dim, lambda: self._refuse_size(dim, what))


def _sliced(rank: int, index: Any) -> Iterator[tuple[int, int, Any]]:
    """Yield each slice of an index as (dim of the tensor, dim of the result, slice); nothing if there are tensor indices."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, Tensor | list) for item in items):
        return
    named = sum(item is not None and item is not Ellipsis for item in items)
    before = after = 0
    for item in items:
        if item is Ellipsis:
            before, after = before + rank - named, after + rank - named
        elif item is None:
            after += 1
        elif isinstance(item, slice):
            yield before, after, item
            before, after = before + 1, after + 1
        else:
            before += 1


def _asked_by_the_model(up: int) -> bool:
    """Return True if the line that many frames up is outside known libraries."""
    return _asking(up + 1) is not None


def _asking(up: int) -> FrameType | None:
    """Return the frame that many frames up; None if it is in a known library."""
    frame: FrameType | None = sys._getframe(up)
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or _is_between(frame)):
        frame = frame.f_back  # another mode that passed the call on
    if frame is None or str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES:
        return None
    return frame


def _is_between(frame: FrameType) -> bool:
    """Return True for a frame that torch puts around function modes."""
    return str(frame.f_globals.get("__name__", "")) in (
        "torch._compile",
        "torch._dynamo.eval_frame",
        "torch.overrides",
        "torch._tensor",
    )
