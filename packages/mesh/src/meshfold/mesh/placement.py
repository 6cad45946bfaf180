"""The placement of one global tensor on a mesh, shard by shard.

A rank's block is an outer product: along each dim it holds a list of segments (start, length) of the global tensor. Usually one
segment. A dim of fused parts has several (Q, K and V in one weight; gate and up): each is split separately, so every rank gets its
heads of all three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from meshfold.mesh.collectives import operations
from meshfold.mesh.errors import LayoutError
from meshfold.mesh.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Part:
    """A span of a dim that is split on its own.

    Attributes:
        size: elements along the dim.
        repeat: how many neighbouring ranks hold the same block (key/value heads when there are fewer than ranks).
    """

    size: int
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A block of the global tensor and its position in the local one: offsets and sizes, in elements, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Global shape, the axes that split each dim, and the parts a fused dim is made of.

    Attributes:
        shape: global shape without padding, in elements.
        axes: for each dim, the mesh axes that split it, major first.
        parts: for a fused dim, its parts; their sizes add up to the dim.
        multiple: for a dim, a number that its padded size must be a multiple of, in addition to the number of its blocks.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    parts: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    multiple: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise LayoutError(
                f"{len(self.axes)} entries of axes {self.axes} for a tensor of {len(self.shape)} dims {self.shape}"
            )
        for dim, parts in self.parts.items():
            if sum(part.size for part in parts) != self.shape[dim]:
                raise LayoutError(
                    f"parts {tuple(part.size for part in parts)} of dim {dim} do not add up to its size "
                    f"{self.shape[dim]}"
                )

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Every axis that splits some dim."""
        return tuple(axis for axes in self.axes for axis in axes)

    def local_shape(self, mesh: Mesh, rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's block, padding included."""
        return tuple(sum(n for _, n in self.segments(mesh, dim, rank)) for dim in range(len(self.shape)))

    def segments(self, mesh: Mesh, dim: int, rank: int | None = None) -> list[tuple[int, int]]:
        """Return (global start, length) of a rank's part along a dim; a start or end beyond the shape is padding."""
        return self._block(dim, mesh.index(*self.axes[dim], rank=rank), mesh.size(*self.axes[dim]))

    def coordinates(self, mesh: Mesh, dim: int, rank: int | None = None) -> Tensor:
        """Return the global coordinate of each local position along a dim, int64; at least the dim's size in padding."""
        return torch.cat([torch.arange(start, start + n, device="cpu") for start, n in self.segments(mesh, dim, rank)])

    def rectangles(self, mesh: Mesh, rank: int | None = None) -> list[Rectangle]:
        """Return the rectangles of the global tensor that a rank holds, padding left out."""
        found = []
        per_dim = [list(self._clipped(mesh, dim, rank)) for dim in range(len(self.shape))]
        for segments in product(*per_dim):
            starts, sizes, local = zip(*segments, strict=True) if segments else ((), (), ())
            found.append(Rectangle(offsets=tuple(starts), sizes=tuple(sizes), local_offsets=tuple(local)))
        return found

    def replicas(self, mesh: Mesh) -> int:
        """Return the number of ranks that hold each block (not counting repeated parts)."""
        return mesh.world_size // mesh.size(*self.split_axes)

    def shard(self, full: Tensor, mesh: Mesh, rank: int | None = None) -> Tensor:
        """Return this rank's block of a global tensor, padded with zeros: a new tensor.

        Raises:
            LayoutError: if the tensor does not have the global shape.
        """
        if tuple(full.shape) != self.shape:
            raise LayoutError(f"a tensor of shape {tuple(full.shape)} where the global shape {self.shape} is wanted")
        local = full.new_zeros(self.local_shape(mesh, rank))
        for box in self.rectangles(mesh, rank):
            _window(local, box.local_offsets, box.sizes).copy_(_window(full, box.offsets, box.sizes))
        return local

    def gather(self, local: Tensor, mesh: Mesh) -> Tensor:
        """Return the global tensor, without padding, on every rank. All ranks of the mesh must call."""
        for dim, axes in enumerate(self.axes):
            blocks = mesh.size(*axes)
            for axis in reversed(axes):
                local = operations.all_gather(local, mesh.group(axis), dim)
            if dim in self.parts:
                order = torch.empty(self.shape[dim], dtype=torch.int64, device="cpu")
                position = 0
                for index in range(blocks):
                    for start, n in self._block(dim, index, blocks):
                        order[start : start + n] = torch.arange(position, position + n, device="cpu")
                        position += n
                local = local.index_select(dim, order.to(local.device))
            else:
                local = local.narrow(dim, 0, self.shape[dim])
        return local.contiguous()

    def _block(self, dim: int, index: int, blocks: int) -> list[tuple[int, int]]:
        if dim not in self.parts:
            length = self._length(dim, blocks)
            return [(index * length, length)]
        found, offset = [], 0
        for part in self.parts[dim]:
            distinct = blocks // part.repeat
            if blocks % part.repeat or part.size % distinct:
                raise LayoutError(
                    f"a part of {part.size} in dim {dim} (repeated {part.repeat} times) cannot be split over "
                    f"{', '.join(self.axes[dim])}: make its size a multiple of {max(distinct, 1)}"
                )
            length = part.size // distinct
            found.append((offset + index // part.repeat * length, length))
            offset += part.size
        return found

    def _length(self, dim: int, blocks: int) -> int:
        """Return elements of a block along a dim, padding included."""
        multiple = math.lcm(blocks, self.multiple.get(dim, 1))
        return math.ceil(self.shape[dim] / multiple) * multiple // blocks

    def _clipped(self, mesh: Mesh, dim: int, rank: int | None) -> Iterator[tuple[int, int, int]]:
        local = 0
        for start, length in self.segments(mesh, dim, rank):
            inside = min(start + length, self.shape[dim]) - start
            if inside > 0:
                yield start, inside, local
            local += length


def _window(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
