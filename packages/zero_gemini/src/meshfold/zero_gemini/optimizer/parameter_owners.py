"""Parameters that one rank owns whole: choice of owners, and the exchange between shards and owners.

A chunk's shards cut through parameters. Optimizers that look at whole matrices step on each parameter at one rank of its chunk's
group, the *owner*. It is usually a rank that already has the parameter, or most of it, in its shard. In a chunk of many parameters
only the ones at the borders of shards are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from meshfold.mesh import Group, all_to_all
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.layout import ChunkSpec, Slot


class Owners:
    """Choice of owners: the same on every rank that passes the same chunks in the same order.

    A parameter within one shard stays there: shards have equal size. Parameters that span several ranks are assigned in order of
    size, the largest first. Each goes to the rank that owns least so far over all chunks of the group, minus its own part of the
    parameter.
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[int, ...], list[int]] = {}

    def choose(self, chunk: ChunkSpec, ranks: tuple[int, ...]) -> dict[str, int]:
        """Return, for each of a chunk's parameters, the owner's index among the ranks that share the chunk."""
        loads = self._loads.setdefault(ranks, [0] * len(ranks))
        chosen = {}
        has_of = {slot.name: chunk.lengths(slot.name) for slot in chunk.slots}

        def order(slot: Slot) -> tuple[bool, int]:
            return slot.numel not in has_of[slot.name], -slot.numel

        for slot in sorted(chunk.slots, key=order):
            has = has_of[slot.name]
            is_whole = slot.numel in has
            rank = (
                has.index(slot.numel)
                if is_whole
                else _least([load - part for load, part in zip(loads, has, strict=True)])
            )
            chosen[slot.name] = rank
            loads[rank] += slot.numel
        return chosen


def _least(numbers: Sequence[int]) -> int:
    return min(range(len(numbers)), key=lambda i: (numbers[i], i))


class Round:
    """Chunks whose pieces are sent in one all-to-all.

    Every piece is sent once, from the rank that has it in its shard to the rank that owns it, or back. The all-to-all of equal
    blocks pads each pair of ranks to the largest. A round has as many chunks as the group has ranks: a chunk of one large
    parameter, all of which goes to one rank, is then balanced by chunks that go to others. A rank's own pieces are not sent. A
    round moves ``N · padded`` elements per rank each way; without padding it would move at most ``N`` shards. It holds two buffers
    of that size on the compute device.
    """

    def __init__(self, chunks: Sequence[Chunk], owners: Mapping[str, int]) -> None:
        """Args:
        chunks: of one group and dtype.
        owners: of all their parameters.
        """
        self.chunks, self._owners = list(chunks), owners
        self._group: Group = chunks[0].group
        self._lengths = {name: chunk.lengths(name) for chunk in chunks for name in chunk.spec.names}
        ranks = range(self._group.size)
        pairs = [[0] * self._group.size for _ in ranks]
        for name, lengths in self._lengths.items():
            for rank in ranks:
                if rank != owners[name]:
                    pairs[rank][owners[name]] += lengths[rank]
        self.padded = max(map(max, pairs))

    def to_owners(self, shards: Mapping[Chunk, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that this rank owns, flat, from all ranks' shards. All ranks of the group must call.

        Args:
            shards: of each chunk: flat, like its shard, of one dtype on any device.
        """
        mine = self._group.index
        sends: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        kept: dict[str, Tensor] = {}
        for chunk in self.chunks:
            for part in chunk.slices:
                piece = shards[chunk][part.shard_start : part.shard_start + part.length]
                if self._owners[part.name] == mine:
                    kept[part.name] = piece
                else:
                    sends[self._owners[part.name]].append(piece)
        arrived = self._exchange(sends, shards[self.chunks[0]].dtype)
        for name, lengths in self._lengths.items():
            if self._owners[name] == mine:
                pieces = [
                    kept[name] if rank == mine and length else next_of(arrived[rank], length)
                    for rank, length in enumerate(lengths)
                    if length
                ]
                device = self.chunks[0].device if len(pieces) > 1 else pieces[0].device
                yield name, pieces[0] if len(pieces) == 1 else torch.cat([piece.to(device) for piece in pieces])

    def to_shards(self, wholes: Mapping[str, Tensor]) -> None:
        """Write the parameters that owners have into the chunks' shards. All of the group must call.

        Args:
            wholes: flat, those that this rank owns, of the chunks' dtype on any device.
        """
        mine = self._group.index
        sends: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        kept: dict[str, Tensor] = {}
        for name, lengths in self._lengths.items():
            if self._owners[name] == mine:
                starts = accumulate(lengths, initial=0)
                for rank, (start, length) in enumerate(zip(starts, lengths, strict=False)):
                    piece = wholes[name][start : start + length]
                    if rank == mine:
                        kept[name] = piece
                    elif length:
                        sends[rank].append(piece)
        arrived = self._exchange(sends, self.chunks[0].dtype)
        for chunk in self.chunks:
            for part in chunk.slices:
                owner = self._owners[part.name]
                piece = kept[part.name] if owner == mine else next_of(arrived[owner], part.length)
                place = chunk.shard[part.shard_start : part.shard_start + part.length]
                if place.data_ptr() != piece.data_ptr() or place.dtype != piece.dtype:
                    place.copy_(piece)

    def _exchange(self, sends: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[list[Tensor]]:
        """Exchange tensors; return one flat tensor per sender, in a list of one so that it can be consumed from the front."""
        if not self.padded:
            return [[] for _ in sends]
        device = self.chunks[0].device
        buffer = torch.zeros(len(sends), self.padded, dtype=dtype, device=device)
        for row, pieces in zip(buffer, sends, strict=True):
            start = 0
            for piece in pieces:
                row[start : start + piece.numel()].copy_(piece)
                start += piece.numel()
        return [[row] for row in all_to_all(buffer, self._group, 0, 0)]


def next_of(row: list[Tensor], length: int) -> Tensor:
    """Take ``length`` elements off the front of the received data."""
    piece, row[0] = row[0][:length], row[0][length:]
    return piece


def rounds_of(chunks: Sequence[Chunk], owners: Mapping[str, int]) -> list[Round]:
    """Divide chunks, in order, into rounds of one group and dtype, each with as many chunks as the group has ranks."""
    found = []
    for _, alike in groupby(
        sorted(chunks, key=lambda chunk: (chunk.group.ranks, str(chunk.dtype))),
        key=lambda chunk: (chunk.group.ranks, str(chunk.dtype)),
    ):
        members = list(alike)
        size = members[0].group.size
        found += [Round(members[i : i + size], owners) for i in range(0, len(members), size)]
    return found
