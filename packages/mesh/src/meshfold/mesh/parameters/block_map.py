"""Map of one parameter's blocks on the ranks of a group: which rank holds which, and how much each counts in sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from meshfold.mesh.group import Group
from meshfold.mesh.parameters.parameter_meta import ParameterMeta


class BlockMap:
    """Map of one parameter's blocks on the ranks of a group, which are numbered by their position in it."""

    def __init__(self, meta: ParameterMeta, group: Group) -> None:
        self._placement, self._mesh, self._group = meta.placement, meta.mesh, group
        self.shape = meta.placement.shape
        self.local_shape = meta.placement.local_shape(meta.mesh)
        self.elements = 1
        for size in self.local_shape:
            self.elements *= size
        holders: dict[int, list[int]] = {}
        for position, rank in enumerate(group.ranks):
            index = meta.mesh.index(*meta.placement.split_axes, rank=rank - meta.mesh.first_rank)
            holders.setdefault(index, []).append(position)
        self._holders = [holders[index] for index in sorted(holders)]
        self._counts = any(positions[0] == group.index for positions in self._holders)
        self.is_whole = len(self._holders) == 1 and self.local_shape == self.shape

    def senders(self, owner: int) -> list[int]:
        """Return ranks whose blocks make up the whole, as near to the owner as possible."""
        found = []
        for positions in self._holders:
            near = owner * len(positions) // self._group.size
            found.append(owner if owner in positions else positions[near])
        return found

    def copies(self, position: int) -> list[int]:
        """Return the positions that have the same block as a rank's, its own among them, ascending."""
        return next(positions for positions in self._holders if position in positions)

    def of_rank(self, whole: Tensor, position: int) -> Tensor:
        """Return a rank's block of a whole tensor, padded with zeros."""
        return self._placement.shard(whole, self._mesh, self._rank(position))

    def put(self, block: Tensor, whole: Tensor, position: int) -> None:
        """Copy a rank's block into the whole tensor."""
        for box in self._placement.rectangles(self._mesh, self._rank(position)):
            into, of = whole, block
            for dim, (offset, local, size) in enumerate(zip(box.offsets, box.local_offsets, box.sizes, strict=True)):
                into, of = into.narrow(dim, offset, size), of.narrow(dim, local, size)
            into.copy_(of)

    def _rank(self, position: int) -> int:
        """Return the rank in the mesh."""
        return self._group.ranks[position] - self._mesh.first_rank

    @cached_property
    def _counted(self) -> list[Tensor | None]:
        """Return, for each dim, the local positions counted on this rank: without padding, and without copies that others count."""
        found: list[Tensor | None] = []
        for dim, size in enumerate(self.shape):
            coordinates = self._placement.coordinates(self._mesh, dim)
            counts = coordinates < size
            parts, index = self._placement.parts.get(dim, ()), self._mesh.index(*self._placement.axes[dim])
            lengths = [length for _, length in self._placement.segments(self._mesh, dim)]
            for part, segment in zip(parts, counts.split(lengths), strict=bool(parts)):
                segment &= index % part.repeat == 0
            found.append(None if bool(counts.all()) else counts.nonzero().flatten())
        return found

    @cached_property
    def _coordinates(self) -> list[Tensor | None]:
        """Return, for each dim, the global coordinate of each local position; None for an unsplit dim."""
        found: list[Tensor | None] = []
        for dim, size in enumerate(self.shape):
            coordinates = self._placement.coordinates(self._mesh, dim)
            same = len(coordinates) == size and bool((coordinates == torch.arange(size)).all())
            found.append(None if same else coordinates)
        return found

    def sum(self, values: Tensor, kept: tuple[int, ...]) -> Tensor:
        """Return this block's contribution to the sum over all but the kept dims, with the whole tensor's sizes along those."""
        sizes = [self.shape[dim] for dim in kept]
        if not self._counts:
            return values.new_zeros(sizes)
        for dim, counted in enumerate(self._counted):
            if counted is not None:
                values = values.index_select(dim, counted.to(values.device))
        total = sum_over_others(values, kept)
        for place, dim in enumerate(kept):
            at = self._counted_coordinates(dim)
            if at is not None:
                spread = total.new_zeros([*total.shape[:place], self.shape[dim], *total.shape[place + 1 :]])
                total = spread.index_copy_(place, at.to(total.device), total)
        return total

    def product(self, values: Tensor, factor: Tensor, dim: int) -> Tensor:
        """Return this block's contribution to the product of the whole matrix with another over one dim."""
        other = 1 - dim
        if not self._counts:
            return values.new_zeros(self.shape[other], factor.shape[1])
        for along, counted in enumerate(self._counted):
            if counted is not None:
                values = values.index_select(along, counted.to(values.device))
        at = self._counted_coordinates(dim)
        factor = factor if at is None else factor.index_select(0, at.to(factor.device))
        found = (values if dim == 1 else values.mT) @ factor
        at = self._counted_coordinates(other)
        if at is None:
            return found
        return found.new_zeros(self.shape[other], found.shape[1]).index_copy_(0, at.to(found.device), found)

    def cut(self, whole: Tensor, dims: Sequence[int]) -> Tensor:
        """Cut this block's part from a tensor whose first dims are the given ones; zeros in padding."""
        for place, dim in enumerate(dims):
            coordinates = self._coordinates[dim]
            if coordinates is not None:
                whole = whole.index_select(place, coordinates.clamp(max=self.shape[dim] - 1).to(whole.device))
                if int(coordinates.max()) >= self.shape[dim]:
                    padding = (coordinates >= self.shape[dim]).nonzero().flatten()
                    whole = whole.index_fill(place, padding.to(whole.device), 0)
        return whole

    def _counted_coordinates(self, dim: int) -> Tensor | None:
        coordinates, counted = self._coordinates[dim], self._counted[dim]
        return coordinates if coordinates is None or counted is None else coordinates[counted]


def sum_over_others(values: Tensor, kept: tuple[int, ...]) -> Tensor:
    """Return the sum over all dims but those that are kept."""
    dropped = [dim for dim in range(values.dim()) if dim not in kept]
    return values.sum(dim=dropped) if dropped else values
