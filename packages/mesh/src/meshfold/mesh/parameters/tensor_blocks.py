"""Blocks of parameters for optimizers that look at whole matrices: sums over their dims, and matrices at owners."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from meshfold.mesh.collectives import operations
from meshfold.mesh.group import Group
from meshfold.mesh.mesh import Mesh
from meshfold.mesh.parameters.block_map import BlockMap, sum_over_others
from meshfold.mesh.parameters.parameter_meta import ParameterMeta, metadata_on

_BUCKET = 1 << 26
ProductOf = tuple[Tensor, Tensor, Tensor, int]
"""A parameter, values of its block's shape, the other matrix, and the dim that is summed over."""
SumOf = tuple[Tensor, Tensor, tuple[int, ...]]
"""A parameter, values of its block's shape, and the dims that are not summed over."""


class ShardedBlocks:
    """Answers an optimizer's questions about the rest of its parameters: see ``Blocks`` of ``meshfold.optimizers``.

    A parameter that is not among those given counts as whole. ``sums`` takes one all-reduce of the numbers that come out.
    ``through_whole`` takes two all-to-alls, or one if blocks are already whole. Each matrix goes to one rank, the largest first,
    always to the rank with the least work. Blocks of the results go to all ranks. Blocks that a rank keeps are not sent; pairs of
    ranks are padded to the largest.

    A parameter of three dims is a stack of matrices, such as the weights of experts. Where a rank has whole ones of them, the ranks
    that have the same ones compute a share each, which the second all-to-all takes to the others.

    All parameters of a call are of one of the lists of ``families``.

    Attributes:
        bucket_elements: number of elements of blocks to ask about together.
    """

    bucket_elements = _BUCKET

    def __init__(
        self,
        metas: Mapping[Tensor, ParameterMeta],
        splitting: Group,
        owners: Group,
        device: torch.device,
        apart: Sequence[ShardedBlocks] = (),
    ) -> None:
        """Args:
        metas: of the parameters that this rank has blocks of.
        splitting: the ranks that have other blocks of them, at least.
        owners: the ranks that matrices are assigned to: ``splitting``, and others that have the same blocks.
        device: where ranks communicate from, and matrices are computed.
        apart: the blocks of parameters whose other blocks are on ranks outside ``splitting``.
        """
        self._apart: dict[Tensor, ShardedBlocks] = {p: blocks for blocks in apart for p in blocks._metas}
        self._splitting, self._owners, self._device = splitting, owners, device
        self._metas: dict[Tensor, ParameterMeta] = dict(metas)
        self._blocks: dict[tuple[Tensor, Group], BlockMap] = {}

    def __deepcopy__(self, memo: object) -> ShardedBlocks:
        """Return the same: a copy of an optimizer has parameters of its own, which count as whole."""
        return self

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        meta = self._of(parameter)._metas.get(parameter)
        return tuple(parameter.shape) if meta is None else meta.placement.shape

    def whole(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if this rank has these parameters whole."""
        return all(self._of(parameter)._split_block(parameter) is None for parameter in parameters)

    def families(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Group the parameters by the ranks that have their other blocks; no list is empty."""
        every = [self, *dict.fromkeys(self._apart.values())]
        lists = [[p for p in parameters if self._of(p) is blocks] for blocks in every]
        return [one for one in lists if one]

    def _of(self, parameter: Tensor) -> ShardedBlocks:
        """Return the blocks that include a parameter."""
        return self._apart.get(parameter, self)

    def sums(self, wanted: Iterable[SumOf | ProductOf]) -> list[Tensor]:
        """Return sums over whole tensors, and products of whole matrices with others; see the class."""
        every = iter(wanted)
        first = next(every, None)
        return [] if first is None else self._of(first[0])._sums(chain([first], every))

    def _sums(self, wanted: Iterable[SumOf | ProductOf]) -> list[Tensor]:
        def addends() -> Iterator[tuple[Tensor, bool]]:
            for one in wanted:
                block = self._split_block(one[0])
                yield (_whole_sum(one) if block is None else _addend(block, one)), block is not None

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
        block = self._of(parameter)._split_block(parameter)
        return whole if block is None else block.cut(whole, dims)

    def through_whole(
        self, parameters: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return blocks of a function of whole matrices, which keeps shape and dtype; see the class."""
        if parameters and self._of(parameters[0]) is not self:
            return self._of(parameters[0]).through_whole(parameters, values, function)
        if self._owners.size == 1 or not all(parameter in self._metas for parameter in parameters):
            return _by_shape(values, function)
        blocks = [self._block(parameter, self._owners) for parameter in parameters]
        here = [len(block.shape) > 2 and block.local_shape[-2:] == block.shape[-2:] for block in blocks]
        pairs = list(zip(blocks, values, here, strict=True))
        stacks = [_Stack(block, value) for block, value, has_whole_ones in pairs if has_whole_ones]
        items = [_Item(block, value) for block, value, has_whole_ones in pairs if not has_whole_ones]
        of_items, of_stacks = map(iter, self._computed(items, stacks, function))
        return [next(of_stacks if has_whole_ones else of_items) for has_whole_ones in here]

    def of_whole(
        self,
        parameters: Sequence[Tensor],
        values: Sequence[Tensor],
        function: Callable[[Tensor], Tensor],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        """Return a function of whole matrices on every rank, in an all-to-all and an all-gather; see the class."""
        if parameters and self._of(parameters[0]) is not self:
            return self._of(parameters[0]).of_whole(parameters, values, function, shapes)
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

    def _split_block(self, parameter: Tensor) -> BlockMap | None:
        """Return a parameter's block unless it is exactly the whole tensor."""
        if parameter not in self._metas:
            return None
        block = self._block(parameter, self._splitting)
        return None if block.is_whole else block

    def _block(self, parameter: Tensor, group: Group) -> BlockMap:
        key = (parameter, group)
        if key not in self._blocks:
            self._blocks[key] = BlockMap(self._metas[parameter], group)
        return self._blocks[key]

    def _computed(
        self, items: Sequence[_Item], stacks: Sequence[_Stack], function: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's blocks of the results: of matrices that owners compute, and of stacks whose copies share the work."""
        mine, owners = self._owners.index, _deal(items, self._owners.size)
        wholes = self._gather(items, owners) if items else {}
        shares = {number: stack.share(mine) for number, stack in enumerate(stacks) if stack.sizes(mine)[mine]}
        computed = _by_shape([*wholes.values(), *shares.values()], function)
        made = dict(zip(wholes, computed, strict=False))
        shared = dict(zip(shares, computed[len(wholes) :], strict=True))
        wholes.clear()
        # Send blocks of the results from each owner to all ranks.
        sends: list[list[Tensor]] = [[] for _ in self._owners.ranks]
        for place, item in enumerate(items):
            if owners[place] == mine:
                for rank, pieces in enumerate(sends):
                    if rank != mine:
                        pieces.append(item.block.of_rank(made[place], rank))
        for number, share in shared.items():
            for rank in stacks[number].sizes(mine):
                if rank != mine:
                    sends[rank].append(share)
        sizes = [0] * self._owners.size
        for place, item in enumerate(items):
            sizes[owners[place]] += item.block.elements
        for stack in stacks:
            for rank in range(len(sizes)):
                copies = stack.sizes(rank)
                sizes[rank] += copies[rank] * (len(copies) > 1)
        arrived = self._exchange(sends, max(sizes), (items or stacks)[0].value.dtype)
        found = []
        for place, item in enumerate(items):
            if owners[place] == mine:
                block = item.block.of_rank(made[place], mine)
            else:
                block = _next_of(arrived, owners[place], item.block.elements).view(item.block.local_shape)
            found.append(block.to(item.value.device))
        of_stacks = []
        for number, stack in enumerate(stacks):
            pieces = [
                shared[number].reshape(-1) if rank == mine else _next_of(arrived, rank, size)
                for rank, size in stack.sizes(mine).items()
                if size
            ]
            of_stacks.append(torch.cat([piece.to(stack.value.device) for piece in pieces]).view(stack.value.shape))
        return found, of_stacks

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


def _whole_sum(one: SumOf | ProductOf) -> Tensor:
    """Return a sum over dims, or a product, of a whole tensor."""
    if len(one) == 3:
        return sum_over_others(one[1], one[2])
    _, values, factor, dim = one
    return (values if dim == 1 else values.mT) @ factor


def _addend(block: BlockMap, one: SumOf | ProductOf) -> Tensor:
    """Return what a block adds to a sum over dims, or to a product."""
    return block.sum(one[1], one[2]) if len(one) == 3 else block.product(*one[1:])


def _by_shape(matrices: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return a function of matrices, or of stacks of them, which handles all of one shape and device in one call."""
    alike: dict[tuple[torch.Size, torch.device], list[int]] = {}
    for place, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.device), []).append(place)
    found = list(matrices)
    for (shape, _), places in alike.items():
        stacked = torch.cat([matrices[place].reshape(-1, *shape[-2:]) for place in places])
        made = function(stacked).view(len(places), *shape)
        for place, one in zip(places, made.unbind(), strict=True):
            found[place] = one
    return found


class _Item(NamedTuple):
    block: BlockMap
    value: Tensor


class _Stack(NamedTuple):
    """Whole matrices of a three-dim parameter that a rank has."""

    block: BlockMap
    value: Tensor

    def sizes(self, rank: int) -> dict[int, int]:
        """Return the ranks that have the same matrices as a rank, with the elements of those that each computes."""
        copies, each = self.block.copies(rank), math.prod(self.block.local_shape[-2:])
        count = self.block.elements // each
        return {
            other: (count // len(copies) + (place < count % len(copies))) * each for place, other in enumerate(copies)
        }

    def share(self, rank: int) -> Tensor:
        """Return the matrices that a rank computes, ``n r c``."""
        sizes = self.sizes(rank)
        first = sum(size for other, size in sizes.items() if other < rank)
        rows, columns = self.value.shape[-2:]
        return self.value.reshape(-1)[first : first + sizes[rank]].view(-1, rows, columns)


def _deal(items: Sequence[_Item], size: int) -> list[int]:
    """Assign an owner to each matrix, largest first, to the rank with the least work so far."""
    work = [math.prod(item.block.shape) * min(item.block.shape[-2:]) for item in items]
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
    known = [*metas.values(), *every]
    split = {axis for meta in known for axis in meta.placement.split_axes}
    if owners is None and len({mesh.spanned(*meta.sum_axes) for meta in every}) > 1:
        return _in_families(metas, mesh, device, known)
    bases = {base_axis(axis) for axis in split}
    splitting = mesh.group(*(axis for axis in mesh.names if axis in bases))
    return ShardedBlocks(metas, splitting, owners or splitting, device)


def _in_families(
    metas: Mapping[Tensor, ParameterMeta], mesh: Mesh, device: torch.device, known: Iterable[ParameterMeta]
) -> ShardedBlocks:
    """Return blocks of parameters that are divided among owners over different axes, such as experts and the rest under ZeRO.

    Ranks along the axes that split a parameter own the same ones of the parameters that are split in this way. Of other
    parameters they may own different ones.
    """

    def over(meta: ParameterMeta) -> tuple[str, ...]:
        return mesh.spanned(*meta.placement.split_axes)

    families = []
    for axes in sorted({over(meta) for meta in known} - {()}):
        group = mesh.group(*axes)
        families.append(ShardedBlocks({p: m for p, m in metas.items() if over(m) == axes}, group, group, device))
    alone = mesh.group()
    return ShardedBlocks({p: m for p, m in metas.items() if not over(m)}, alone, alone, device, families)


def base_axis(axis: str) -> str:
    """Return the axis of the mesh that an axis or a factor of one belongs to.

    >>> base_axis("data%2"), base_axis("data")
    ('data', 'data')
    """
    return axis.split("/")[0].split("%")[0]
