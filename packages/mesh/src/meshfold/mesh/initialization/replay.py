"""Replay of recorded tensors: values of one block, element by element where the operations allow it.

Constants, random numbers and pointwise operations are replayed on only the block. Other operations (a triangle, a concatenation, a
decomposition) are replayed on the whole tensor on the CPU, and the block is cut out of it. For a large tensor this is an error.
Random numbers are indexed by an element's position in its storage, so both ways and every view give the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.initialization.writes import EMPTY, TRUNCATED_NORMAL, Geometry, Recording, Ref, Target, Window, Write
from meshfold.mesh.random.numbers import fill_normal_, fill_truncated_normal_, fill_uniform_

_WHOLE_LIMIT = 1 << 26  # largest tensor, in elements, that is computed whole for a block of it
_SMALL = 1 << 16  # arguments up to this many elements are computed whole and kept
_CONSTANTS = {
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "zero_": 0,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
}
_VALUES = {
    "full": 1,
    "full_like": 1,
    "new_full": 2,
    "scalar_tensor": 0,
    "fill_": 1,
}  # index of the value argument
_UNIFORM = {"rand", "rand_like", "uniform_"}
_NORMAL = {"randn", "randn_like", "normal_"}
_RANDOM = {*_UNIFORM, *_NORMAL, TRUNCATED_NORMAL}
_COPIES = {"copy_": 1, "_to_copy": 0, "clone": 0}  # index of the source argument


@dataclass(frozen=True, slots=True)
class Replay:
    """Computes recorded tensors for one seed.

    Attributes:
        recording: of the writes.
        keys: the key of each random write.
        seed: the seed of the model.
        device: where blocks are computed.
        name: the tensor's name in errors.
        advice: what errors tell the user to do instead.
        known: small tensors that were computed already.
    """

    recording: Recording
    keys: Mapping[Write, int]
    seed: int
    device: torch.device
    name: str
    advice: str
    known: dict[tuple[Ref, torch.device], Tensor] = field(default_factory=dict)

    def block(self, ref: Ref, coordinates: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Return the elements at the outer product of the coordinates, zero for a coordinate beyond the tensor."""
        base = ref.geometry
        shape = [len(points) for points in coordinates]
        if len(shape) != len(base.size) or (out is not None and list(out.shape) != shape):
            raise MeshfoldError(
                f"{shape} coordinates along the dims of {self.name!r}, which has the shape {base.size}, for a block of "
                f"shape {None if out is None else tuple(out.shape)}: give one coordinate a position along each dim"
            )
        if out is None:
            out = torch.empty(shape, dtype=base.dtype, device=self.device)
        log = self.recording.log_of(ref)
        if not log.defined(ref.writes):
            raise MeshfoldError(f"{self.name!r} depends on a tensor that is never initialised: {self.advice}")
        writes = log.live(ref.writes)
        windows = [self._window(write, ref) for write in writes]
        if any(window is None for window in windows):
            self._check_whole(ref, out, writes, windows)
            out.copy_(take_block(self.whole(ref), coordinates))
        else:
            for write, window in zip(writes, windows, strict=True):
                if window is not None:
                    self._apply(write, window, base, coordinates, out)
        return _zero_padding_(out, coordinates, base.size)

    def whole(self, ref: Ref) -> Tensor:
        """Return all elements, on the CPU, by replaying every write in full."""
        here = replace(self, device=torch.device("cpu"))
        log = self.recording.log_of(ref)
        storage = torch.UntypedStorage(log.storage.nbytes())
        for write in log.live(ref.writes):
            target = _view(storage, write.target)
            if write.random:
                here._draw(write, write.target, [torch.arange(size) for size in write.target.size], target)
            else:
                args, kwargs = tree_map_only(Ref, here._all, (write.args, write.kwargs))
                here._run(write, args, kwargs, target)
        return _view(storage, ref.geometry)

    def _all(self, ref: Ref) -> Tensor:
        return self._source(ref, [torch.arange(size) for size in ref.geometry.size])

    def _window(self, write: Write, ref: Ref) -> Window | None:
        """Return the window that a write covers if it can be replayed there element by element, else None."""
        base = ref.geometry
        kind = write.name
        pointwise = not isinstance(write.func, str) and torch.Tag.pointwise in write.func.tags
        if not (pointwise or kind in _RANDOM or kind in _CONSTANTS or kind in _VALUES or kind in _COPIES):
            return Window.all(base) if kind in EMPTY else None
        sources = [leaf for leaf in tree_leaves((write.args, write.kwargs)) if isinstance(leaf, (Ref, Tensor))]
        window = Window.of(write.target, base)
        everywhere = write.target.covers(self.recording.log_of(ref).storage.nbytes())
        if window is None and everywhere and write.target.dtype == base.dtype and not sources:
            return Window.all(base)  # all elements are treated equally, so the shape does not matter
        return window

    def _check_whole(self, ref: Ref, out: Tensor, writes: Sequence[Write], windows: Sequence[Window | None]) -> None:
        if ref.geometry.numel > max(_WHOLE_LIMIT, out.numel()):
            culprit = next((w.name for w, window in zip(writes, windows, strict=True) if window is None), "nothing")
            raise MeshfoldError(
                f"{self.name!r}, with {ref.geometry.numel} elements, is initialised by {culprit}, which cannot be "
                f"replayed on a block of it: {self.advice}"
            )

    def _apply(self, write: Write, window: Window, base: Geometry, coordinates: Sequence[Tensor], out: Tensor) -> None:
        """Replay a write on the part of a block that it covers."""
        places = [window.positions(d, points, base.size[d]) for d, points in enumerate(coordinates)]
        points = [part if isinstance(at, slice) else part[at] for part, at in zip(coordinates, places, strict=True)]
        if write.target.numel == 0 or any(len(part) == 0 for part in points):
            return
        part = out
        for dim, at in enumerate(places):
            if isinstance(at, Tensor):
                part = part.index_select(dim, at.to(out.device))
        if write.random:
            self._draw(write, base, points, part)
        else:
            target = _as_written(part, window.dims)
            along = [
                torch.zeros(1, dtype=torch.int64)
                if d is None
                else (points[d] - window.starts[d]).div(window.steps[d], rounding_mode="floor")
                for d in window.dims
            ]
            args, kwargs = tree_map_only(
                (Ref, Tensor), lambda source: self._source(source, along), (write.args, write.kwargs)
            )
            self._run(write, args, kwargs, target)
        if part is not out:
            out[_grid(places, out.shape, out.device)] = part

    def _source(self, source: Ref | Tensor, along: Sequence[Tensor]) -> Tensor:
        """Return the elements of an argument that broadcasting pairs with the coordinates."""
        size = source.geometry.size if isinstance(source, Ref) else tuple(source.shape)
        last = along[len(along) - len(size) :]
        points = [p if n != 1 else torch.zeros(1, dtype=torch.int64) for n, p in zip(size, last, strict=True)]
        if isinstance(source, Ref):
            if source.geometry.numel > _SMALL:
                return self.block(source, points)
            known = (source, self.device)
            if known not in self.known:
                self.known[known] = self.block(source, [torch.arange(n) for n in size])
            source = self.known[known]
        return take_block(source, points).to(self.device)

    def _draw(self, write: Write, base: Geometry, points: Sequence[Tensor], part: Tensor) -> None:
        """Fill with random numbers, determined by the elements' offsets in their storage."""
        if write.name not in _RANDOM or write not in self.keys:
            why = "draws random numbers by" if write.name in _RANDOM else "is initialised by"
            raise MeshfoldError(f"{self.name!r} {why} {write.name}, which cannot be replayed: {self.advice}")
        where: dict[str, Any] = {
            "seed": self.seed,
            "key": self.keys[write],
            "strides": base.stride,
            "offset": base.offset,
        }
        if write.name in _NORMAL:
            mean, std = _pair(write, ("mean", 0.0), ("std", 1.0))
            fill_normal_(part, points, base.size, mean=mean, std=std, **where)
        elif write.name in _UNIFORM:
            low, high = _pair(write, ("from", 0.0), ("to", 1.0))
            fill_uniform_(part, points, base.size, low=low, high=high, **where)
        else:
            mean, std, low, high = write.args[1:]
            fill_truncated_normal_(part, points, base.size, mean=mean, std=std, low=low, high=high, **where)

    def _run(self, write: Write, args: Sequence[Any], kwargs: Mapping[str, Any], target: Tensor) -> None:
        """Replay a write that draws no random numbers."""
        name = write.name
        if name in EMPTY:
            return
        if name in _CONSTANTS:
            target.fill_(_CONSTANTS[name])
        elif name in _VALUES:
            target.fill_(args[_VALUES[name]])
        elif name in _COPIES:
            target.copy_(args[_COPIES[name]])
        elif write.output is None:
            args, kwargs = tree_map_only(Target, lambda _: target, (tuple(args), dict(kwargs)))
            write.func(*args, **kwargs)
        else:
            kwargs = {k: self.device if k == "device" else v for k, v in kwargs.items()}
            results = tree_leaves(write.func(*args, **kwargs))
            target.copy_(results[write.output])


def _view(storage: torch.UntypedStorage, geometry: Geometry) -> Tensor:
    return torch.empty(0, dtype=geometry.dtype).set_(storage, geometry.offset, geometry.size, geometry.stride)


def take_block(tensor: Tensor, coordinates: Sequence[Tensor]) -> Tensor:
    """Return the elements at the outer product of coordinates, zero for one beyond the tensor: a new tensor."""
    size = tensor.shape
    for dim, points in enumerate(coordinates):
        tensor = tensor.index_select(dim, points.clamp(max=size[dim] - 1).to(tensor.device))
    return _zero_padding_(tensor if coordinates else tensor.clone(), coordinates, size)


def _zero_padding_(block: Tensor, coordinates: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    for dim, (points, n) in enumerate(zip(coordinates, size, strict=True)):
        padding = (points >= n).nonzero().flatten()
        if padding.numel():
            block.index_fill_(dim, padding.to(block.device), 0)
    return block


def _grid(places: Sequence[slice | Tensor], shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Return index tensors that select an outer product of positions (None: all) from a tensor of this shape."""
    along = [torch.arange(n)[at] if isinstance(at, slice) else at for at, n in zip(places, shape, strict=True)]
    return tuple(points.to(device).reshape(-1, *[1] * (len(along) - dim - 1)) for dim, points in enumerate(along))


def _as_written(part: Tensor, dims: Sequence[int | None]) -> Tensor:
    """View a part of a block with the dims of the written tensor; dims written at a single index come first."""
    mapped = [dim for dim in dims if dim is not None]
    others = [dim for dim in range(part.dim()) if dim not in mapped]
    part = part.permute((*others, *mapped))
    for place, dim in enumerate(dims):
        if dim is None:
            part = part.unsqueeze(len(others) + place)
    return part


def _pair(write: Write, *defaults: tuple[str, float]) -> tuple[float, float]:
    """Return the two parameters of a distribution, passed by position or by name."""
    numbers = [argument for argument in write.args if isinstance(argument, (int, float))]
    first, second = (
        numbers[place] if place < len(numbers) else write.kwargs.get(name, default)
        for place, (name, default) in enumerate(defaults)
    )
    return float(first), float(second)
