"""Blocks of parameters for optimizers that look at whole matrices: sums over their dims, and matrices at owners."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from meshfold.mesh.collectives import operations
from meshfold.mesh.group import Group
from meshfold.mesh.mesh import Mesh
from meshfold.mesh.parameters.parameter_meta import ParameterMeta, metadata_on

_BUCKET = 1 << 26
ProductOf = tuple[Tensor, Tensor, Tensor, int]
"""A parameter, values of its block's shape, the other matrix, and the dim that is summed over."""
SumOf = tuple[Tensor, Tensor, tuple[int, ...]]
"""A parameter, values of its block's shape, and the dims that are not summed over."""


class ShardedBlocks:
    """Answers what an optimizer asks of the rest of its parameters: see ``Blocks`` of ``meshfold.optimizers``.

    A parameter that is not among those given counts as whole. ``sums`` takes one all-reduce of the numbers that come
    out. ``through_whole`` takes two all-to-alls, or one where blocks are whole already: each matrix goes to one
    rank, the largest first to the rank with least to do, and blocks of what comes out go to all ranks. What a rank
    keeps does not travel; pairs of ranks are padded to the largest.

    Attributes:
        bucket_elements: number of elements of blocks to ask about together.
    """

    bucket_elements = _BUCKET

    def __init__(
        self, metas: Mapping[Tensor, ParameterMeta], splitting: Group, owners: Group, device: torch.device
    ) -> None:
        """Args:
        metas: of the parameters that this rank has blocks of.
        splitting: the ranks that have other blocks of them, at least.
        owners: the ranks that matrices are assigned to: those of ``splitting``, and others that have the same blocks.
        device: where ranks communicate from, and matrices are computed.
        """
        self._splitting, self._owners, self._device = splitting, owners, device
        self._metas = dict(metas)
        self._blocks: dict[tuple[Tensor, Group], _Block] = {}

    def __deepcopy__(self, memo: object) -> ShardedBlocks:
        """Return the same: a copy of an optimizer has parameters of its own, which count as whole."""
        return self

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        meta = self._metas.get(parameter)
        return tuple(parameter.shape) if meta is None else meta.placement.shape

    def whole(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether this rank has all of each of these parameters."""
        return all(self._split_block(parameter) is None for parameter in parameters)

    def sums(self, wanted: Iterable[SumOf]) -> list[Tensor]:
        """Return sums over whole tensors; see the class."""

        def addends() -> Iterator[tuple[Tensor, bool]]:
            for parameter, values, kept in wanted:
                block = self._split_block(parameter)
                mine = _sum_over_others(values, kept) if block is None else block.sum(values, kept)
                yield mine, block is not None

        return self._added_up(addends())

    def products(self, wanted: Iterable[ProductOf]) -> list[Tensor]:
        """Return products of whole matrices with others; see the class."""

        def addends() -> Iterator[tuple[Tensor, bool]]:
            for parameter, values, factor, dim in wanted:
                block = self._split_block(parameter)
                if block is None:
                    yield (values if dim == 1 else values.mT) @ factor, False
                else:
                    yield block.product(values, factor, dim), True

        return self._added_up(addends())

    def _added_up(self, addends: Iterable[tuple[Tensor, bool]]) -> list[Tensor]:
        """Return the tensors; sum the marked ones over the ranks that split parameters."""
        found: list[Tensor] = []
        shared: list[int] = []
        for addend, is_shared in addends:
            if is_shared:
                shared.append(len(found))
            found.append(addend)
        if not shared or self._splitting.size == 1:
            return found
        wide = torch.float64 if any(found[i].dtype == torch.float64 for i in shared) else torch.float32
        flat = torch.cat([found[i].reshape(-1).to(self._device, wide) for i in shared])
        summed = operations.all_reduce(flat, self._splitting).split([found[i].numel() for i in shared])
        for i, one in zip(shared, summed, strict=True):
            found[i] = one.view(found[i].shape).to(found[i].device, found[i].dtype)
        return found

    def cut(self, whole: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the part of a tensor over some dims of the whole that belongs to the block."""
        block = self._split_block(parameter)
        return whole if block is None else block.cut(whole, dims)

    def through_whole(
        self, parameters: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return blocks of a function of whole matrices, which keeps shape and dtype; see the class."""
        if not all(parameter in self._metas for parameter in parameters):
            return [function(value.unsqueeze(0)).squeeze(0) for value in values]
        if self._owners.size == 1:
            return _by_shape(values, function)
        blocks = [self._block(parameter, self._owners) for parameter in parameters]
        items = [_Item(block, value) for block, value in zip(blocks, values, strict=True)]
        return self._computed(items, function) if items else []

    def of_whole(
        self,
        parameters: Sequence[Tensor],
        values: Sequence[Tensor],
        function: Callable[[Tensor], Tensor],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        """Return a function of whole matrices on every rank, in an all-to-all and an all-gather; see the class."""
        if not all(parameter in self._metas for parameter in parameters):
            return [function(value) for value in values]
        blocks = [self._block(parameter, self._owners) for parameter in parameters]
        items = [_Item(block, value) for block, value in zip(blocks, values, strict=True)]
        if not items:
            return []
        owners = _deal(items, self._owners.size)
        wholes = self._gather(items, owners)
        made = {place: function(wholes.pop(place)).reshape(-1) for place in list(wholes)}
        counts, sizes = [math.prod(shape) for shape in shapes], [0] * self._owners.size
        for owner, count in zip(owners, counts, strict=True):
            sizes[owner] += count
        mine = torch.zeros(max(sizes), dtype=values[0].dtype, device=self._device)
        if made:
            own = torch.cat([made[place] for place in sorted(made)])
            mine[: own.numel()] = own
        rows = [[row] for row in operations.all_gather(mine.unsqueeze(0), self._owners)]
        return [
            _next_of(rows, owner, count).view(shape).to(item.value.device)
            for owner, count, shape, item in zip(owners, counts, shapes, items, strict=True)
        ]

    def _split_block(self, parameter: Tensor) -> _Block | None:
        """Return a parameter's block unless it is exactly the whole tensor."""
        if parameter not in self._metas:
            return None
        block = self._block(parameter, self._splitting)
        return None if block.is_whole else block

    def _block(self, parameter: Tensor, group: Group) -> _Block:
        key = (parameter, group)
        if key not in self._blocks:
            self._blocks[key] = _Block(self._metas[parameter], group)
        return self._blocks[key]

    def _computed(self, items: Sequence[_Item], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        mine, owners = self._owners.index, _deal(items, self._owners.size)
        wholes = self._gather(items, owners)
        made = dict(zip(wholes, _by_shape(list(wholes.values()), function), strict=True))
        wholes.clear()
        # Send blocks of the results from each owner to all ranks.
        sends: list[list[Tensor]] = [[] for _ in self._owners.ranks]
        for place, item in enumerate(items):
            if owners[place] == mine:
                for rank, pieces in enumerate(sends):
                    if rank != mine:
                        pieces.append(item.block.of_rank(made[place], rank))
        sizes = [0] * self._owners.size
        for place, item in enumerate(items):
            sizes[owners[place]] += item.block.elements
        arrived = self._exchange(sends, max(sizes), items[0].value.dtype)
        found = []
        for place, item in enumerate(items):
            if owners[place] == mine:
                block = item.block.of_rank(made[place], mine)
            else:
                block = _next_of(arrived, owners[place], item.block.elements).view(item.block.local_shape)
            found.append(block.to(item.value.device))
        return found

    def _gather(self, items: Sequence[_Item], owners: Sequence[int]) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns, by index."""
        mine, size = self._owners.index, self._owners.size
        sends: list[list[Tensor]] = [[] for _ in range(size)]
        pairs = [[0] * size for _ in range(size)]
        for item, owner in zip(items, owners, strict=True):
            for sender in item.block.senders(owner):
                if sender != owner:
                    pairs[sender][owner] += item.block.elements
                    if sender == mine:
                        sends[owner].append(item.value)
        arrived = self._exchange(sends, max(map(max, pairs)), items[0].value.dtype)
        wholes = {}
        for place, (item, owner) in enumerate(zip(items, owners, strict=True)):
            if owner != mine:
                continue
            whole = item.value.new_empty(item.block.shape, device=self._device)
            for sender in item.block.senders(owner):
                value = item.value.to(self._device)
                if sender != mine:
                    value = _next_of(arrived, sender, item.block.elements).view(item.block.local_shape)
                item.block.put(value, whole, sender)
            wholes[place] = whole
        return wholes

    def _exchange(self, sends: Sequence[Sequence[Tensor]], padded: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """Exchange tensors; return one flat tensor per sender, in a list of one so that it can be consumed from the front."""
        if not padded or self._owners.size == 1:
            return [[] for _ in sends]
        buffer = torch.zeros(len(sends), padded, dtype=dtype, device=self._device)
        for row, pieces in zip(buffer, sends, strict=True):
            start = 0
            for piece in pieces:
                row[start : start + piece.numel()].copy_(piece.reshape(-1))
                start += piece.numel()
        return [[row] for row in operations.all_to_all(buffer, self._owners, 0, 0)]


def _by_shape(matrices: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return a function of matrices, those of one shape and device in one call."""
    alike: dict[tuple[torch.Size, torch.device], list[int]] = {}
    for place, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.device), []).append(place)
    found = list(matrices)
    for places in alike.values():
        stacked = torch.stack([matrices[place] for place in places])
        for place, one in zip(places, function(stacked).unbind(), strict=True):
            found[place] = one
    return found


class _Item(NamedTuple):
    block: _Block
    value: Tensor


class _Block:
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
            holders.setdefault(meta.mesh.index(*meta.placement.split_axes, rank=rank), []).append(position)
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

    def of_rank(self, whole: Tensor, position: int) -> Tensor:
        """Return a rank's block of a whole tensor, padded with zeros."""
        return self._placement.shard(whole, self._mesh, self._group.ranks[position])

    def put(self, block: Tensor, whole: Tensor, position: int) -> None:
        """Copy a rank's block into the whole tensor."""
        for box in self._placement.rectangles(self._mesh, self._group.ranks[position]):
            into, of = whole, block
            for dim, (offset, local, size) in enumerate(zip(box.offsets, box.local_offsets, box.sizes, strict=True)):
                into, of = into.narrow(dim, offset, size), of.narrow(dim, local, size)
            into.copy_(of)

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
        total = _sum_over_others(values, kept)
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


def _sum_over_others(values: Tensor, kept: tuple[int, ...]) -> Tensor:
    dropped = [dim for dim in range(values.dim()) if dim not in kept]
    return values.sum(dim=dropped) if dropped else values


def _deal(items: Sequence[_Item], size: int) -> list[int]:
    """Assign an owner to each matrix, largest first, to the rank with the least work so far."""
    work = [item.block.shape[0] * item.block.shape[1] * min(item.block.shape) for item in items]
    loads, owners = [0] * size, [0] * len(items)
    for place in sorted(range(len(items)), key=lambda i: (-work[i], i)):
        owners[place] = min(range(size), key=lambda rank: (loads[rank], rank))
        loads[owners[place]] += work[place]
    return owners


def _next_of(arrived: Sequence[list[Tensor]], rank: int, elements: int) -> Tensor:
    piece, arrived[rank][0] = arrived[rank][0][:elements], arrived[rank][0][elements:]
    return piece


def sharded_blocks(parameters: Sequence[Tensor], mesh: Mesh, owners: Group, device: torch.device) -> ShardedBlocks:
    """Return the blocks of parameters that are this rank's, over the axes that split any of them.

    Args:
        parameters: with their metadata.
        mesh: where they lie.
        owners: the ranks that have the same parameters, or other blocks of them.
        device: where ranks communicate from.
    """
    metas = {parameter: metadata_on(parameter, mesh) for parameter in parameters}
    return blocks_of(metas, mesh, owners, device)


def blocks_of(
    metas: Mapping[Tensor, ParameterMeta],
    mesh: Mesh,
    owners: Group | None,
    device: torch.device,
    every: Iterable[ParameterMeta] = (),
) -> ShardedBlocks:
    """Return the blocks of parameters whose metadata are given.

    Args:
        metas: of the parameters of this rank.
        mesh: where they lie.
        owners: the ranks that matrices are assigned to; None: those that have other blocks.
        device: where ranks communicate from.
        every: metadata of all parameters, where a rank does not have each.
    """
    split = {axis for meta in (*metas.values(), *every) for axis in meta.placement.split_axes}
    bases = {base_axis(axis) for axis in split}
    splitting = mesh.group(*(axis for axis in mesh.names if axis in bases))
    return ShardedBlocks(metas, splitting, owners or splitting, device)


def base_axis(axis: str) -> str:
    """Return the axis of the mesh that an axis or a factor of one belongs to.

    >>> base_axis("data%2"), base_axis("data")
    ('data', 'data')
    """
    return axis.split("/")[0].split("%")[0]
