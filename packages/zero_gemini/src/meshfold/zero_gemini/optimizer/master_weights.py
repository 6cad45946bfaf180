"""Master weights of a chunk and the planes that Adam keeps with them: names, dtypes, bytes, and a second copy.

Master weights are the chunk's shard itself where possible, else a separate plane. A chunk with a second copy can be
stepped before the gradient norm is known: if the gradient's factor is as expected, the copies are swapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshfold.kernels import AdamState, QuantizedState, SplitState, WholeState
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.memory.arena import Block, MemoryTier


class Weights:
    """One plane of master weights. They are the shard itself if it has their dtype and placement.

    Attributes:
        chunk: whose.
        place: their memory tier; the host if the state is on disk, since they are published to the model every step.
        tensor: flat, ``shard_elems``.
        parameters: this rank's part of each parameter, as views of ``tensor``, for an optimizer of torch.
    """

    def __init__(self, chunk: Chunk, dtype: torch.dtype, place: MemoryTier) -> None:
        """Allocate zeros, unless the weights are the shard itself."""
        self.chunk, self.dtype, self.place = chunk, dtype, place
        self._own: Block | None = None
        self.tensor = self._settled()
        self.parameters = {part.name: nn.Parameter(torch.empty(0, dtype=dtype)) for part in chunk.slices}
        self._point()

    @property
    def are_shard(self) -> bool:
        """Return True if the master weights are the chunk's shard itself."""
        return self._own is None

    @property
    def has_shard_beside(self) -> bool:
        """Return True if the shard is another plane of another dtype, and both are on the device."""
        wide = self._own is not None and self.dtype != self.chunk.dtype
        return wide and self.place == "device" and self._shard_is_there

    def slices_of(self, plane: Tensor) -> dict[Tensor, Tensor]:
        """Return the part of a plane like the shard that belongs to each parameter."""
        return {
            self.parameters[part.name]: plane[part.shard_start : part.shard_start + part.length]
            for part in self.chunk.slices
        }

    @torch.no_grad()
    def show(self) -> None:
        """Start copying them to the chunk's shard during compute; ``chunk.wait`` waits for the copy."""
        if self._own is not None:
            self.chunk.show(self._own.tensor)

    @torch.no_grad()
    def move(self, place: MemoryTier, parameters: MemoryTier, dtype: torch.dtype | None = None) -> None:
        """Move to ``place``, and the chunk's shard to ``parameters``; on an error nothing has changed.

        Args:
            place: of the weights.
            parameters: where the shard is from now on.
            dtype: of the weights from now on; None: as before.

        Raises:
            OutOfBudget: if one of the arenas has less left.
        """
        was, tier, before = self.place, self.chunk.tier, self.dtype
        if self._own is None:  # views would keep the chunk's memory alive
            self.tensor = self.tensor.new_empty(0)
            self._point()
        try:
            self.chunk.move(parameters)
            self.place, self.dtype = place, dtype or before
            self.tensor = self._settled()
        except BaseException:
            if self.chunk.tier != tier:
                self.chunk.move(tier)
            self.place, self.dtype = was, before
            self.tensor = self._settled()
            raise
        finally:
            self._point()

    def exchange(self, block: Block) -> Block:
        """Swap in another block on the same tier with the next values; return the old one."""
        if self._own is None:
            was = self.chunk.exchange(block)
        else:
            was, self._own = self._own, block
        self.tensor = block.tensor
        self._point()
        return was

    def free(self) -> None:
        """Release the memory."""
        self.tensor = self.tensor.new_empty(0)
        self._point()
        if self._own is not None:
            self._own.free()
            self._own = None

    @property
    def _shard_is_there(self) -> bool:
        return (self.chunk.resident or self.chunk.tier == "device") == (self.place == "device")

    def _settled(self) -> Tensor:
        """Return the weights' tensor; allocate or free separate memory depending on their tier and the shard's."""
        chunk, own = self.chunk, self._own
        if self.dtype == chunk.dtype and self._shard_is_there:
            if own is not None:
                chunk.shard.copy_(own.tensor)
                own.free()
                self._own = None
            return chunk.shard
        if own is None or own.arena is not chunk.memory.arena(self.place) or own.tensor.dtype != self.dtype:
            block = chunk.memory.allocate(chunk.shard.numel(), self.dtype, self.place, "master weights")
            block.tensor.copy_(chunk.shard if own is None else own.tensor)
            if own is not None:
                own.free()
            self._own = own = block
        return own.tensor

    def _point(self) -> None:
        """Point the parameters at the weights; keep the objects, since the optimizer's groups refer to them."""
        for part in self.chunk.slices:
            self.parameters[part.name].data = self.tensor[part.shard_start : part.shard_start + part.length]


@dataclass(kw_only=True)
class SecondCopy:
    """Memory of the same kind and size as a chunk's weights and planes.

    Attributes:
        weights: of the shard.
        planes: stored in addition, by name.
    """

    weights: Block
    planes: dict[str, Block]

    def free(self) -> None:
        """Release the memory."""
        for block in (self.weights, *self.planes.values()):
            block.free()


BLOCK_ELEMS = 256
"""Elements that share the scale of an 8-bit moment."""

_LINE_BYTES = 64
_SCALE = "_scale"

MOMENTS = ("exp_avg", "exp_avg_sq")


class Plane(NamedTuple):
    """One tensor of a chunk's state.

    Attributes:
        name: as in the state of :mod:`meshfold.kernels`.
        dtype: of its values.
        each: consecutive elements of the chunk that share a value.
    """

    name: str
    dtype: torch.dtype
    each: int = 1

    def numel(self, elements: int) -> int:
        """Return the number of values for ``elements`` elements of a chunk."""
        return -(-elements // self.each)

    @property
    def is_of_moments(self) -> bool:
        """Return True if the first half of a step does not change it."""
        return self.name.removesuffix(_SCALE) in MOMENTS


def planes_of(dtype: torch.dtype, regime: str) -> tuple[Plane, ...]:
    """Return the planes that are kept with the weights of a model that computes in ``dtype``."""
    wide = (Plane("exp_avg", torch.float32), Plane("exp_avg_sq", torch.float32))
    if dtype == torch.float32:
        return wide
    if dtype == torch.float16:
        return (Plane("parameter", torch.float32), *wide)
    lo = Plane("lo", torch.int16)
    if regime == "A":
        return (lo, *wide)
    if regime == "B":
        return (lo, *(Plane(name, torch.bfloat16) for name in MOMENTS))
    codes = (Plane(name, torch.uint8) for name in MOMENTS)
    scales = (Plane(f"{name}{_SCALE}", torch.float32, BLOCK_ELEMS) for name in MOMENTS)
    return (lo, *codes, *scales)


def lie(planes: tuple[Plane, ...], elements: int) -> tuple[list[tuple[Plane, int, int]], int]:
    """Lay planes out in one flat buffer; return each one's first byte and one past its last, and the bytes of all."""
    found, at = [], 0
    for plane in planes:
        begin = -(-at // _LINE_BYTES) * _LINE_BYTES
        at = begin + plane.numel(elements) * plane.dtype.itemsize
        found.append((plane, begin, at))
    return found, at


def views(buffer: Tensor, planes: tuple[Plane, ...], elements: int) -> dict[str, Tensor]:
    """Return the planes in a buffer of bytes with this layout."""
    return {plane.name: buffer[begin:end].view(plane.dtype) for plane, begin, end in lie(planes, elements)[0]}


def state_of(weights: Tensor, planes: Mapping[str, Tensor]) -> AdamState:
    """Return the state that the kernels take, from weights and their planes."""
    if weights.dtype == torch.float32:
        return WholeState(parameter=weights, **planes)
    if weights.dtype == torch.float16:
        return WholeState(copy=weights, **planes)
    if "exp_avg_scale" in planes:
        return QuantizedState(hi=weights, **planes)
    return SplitState(hi=weights, **planes)


def cut(planes: tuple[Plane, ...], tensors: Mapping[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """Return the elements from ``begin`` up to ``end`` of all planes: views."""
    return {plane.name: tensors[plane.name][begin // plane.each : plane.numel(end)] for plane in planes}
