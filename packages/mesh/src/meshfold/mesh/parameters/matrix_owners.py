"""Whole matrices that are split over ranks: each is put together at one rank, its owner, which computes a function of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshfold.mesh.collectives import operations
from meshfold.mesh.group import Group
from meshfold.mesh.parameters.block_map import BlockMap


class MatrixOwners:
    """Ranks that share the computing of functions of whole matrices; all of them must call, with blocks in the same order."""

    def __init__(self, owners: Group, device: torch.device) -> None:
        """Args:
        owners: the ranks that matrices are assigned to; together they have all blocks of each.
        device: where ranks communicate from, and matrices are computed.
        """
        self._owners, self._device = owners, device

    def blocks_of(
        self, blocks: Sequence[BlockMap], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return this rank's blocks of a function of whole matrices, in two all-to-alls.

        Args:
            blocks: of the matrices, or of stacks of them.
            values: this rank's block of each.
            function: of a stack of matrices of one shape; keeps shape and dtype.
        """
        here = [len(block.shape) > 2 and block.local_shape[-2:] == block.shape[-2:] for block in blocks]
        pairs = list(zip(blocks, values, here, strict=True))
        stacks = [_Stack(block, value) for block, value, has_whole_ones in pairs if has_whole_ones]
        items = [_Item(block, value) for block, value, has_whole_ones in pairs if not has_whole_ones]
        of_items, of_stacks = map(iter, self._computed(items, stacks, function))
        return [next(of_stacks if has_whole_ones else of_items) for has_whole_ones in here]

    def everywhere(
        self,
        blocks: Sequence[BlockMap],
        values: Sequence[Tensor],
        function: Callable[[Tensor], Tensor],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        """Return a function of whole matrices on every rank, in an all-to-all and an all-gather.

        Args:
            blocks: of the matrices.
            values: this rank's block of each.
            function: of one matrix.
            shapes: of the results, which are of the values' dtype.
        """
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

    def _computed(
        self, items: Sequence[_Item], stacks: Sequence[_Stack], function: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's blocks of the results: of matrices that owners compute, and of stacks whose copies share the work."""
        mine, owners = self._owners.index, _deal(items, self._owners.size)
        wholes = self._gather(items, owners) if items else {}
        shares = {number: stack.share(mine) for number, stack in enumerate(stacks) if stack.sizes(mine)[mine]}
        computed = by_shape([*wholes.values(), *shares.values()], function)
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


def by_shape(matrices: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
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
