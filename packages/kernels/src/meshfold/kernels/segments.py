"""The segments that rows of tokens are cut into: packed documents, and completions behind a prompt that they share."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import count, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Segment(NamedTuple):
    """Tokens ``start`` to ``stop`` of a row, which see themselves causally, and ``kept`` tokens of the row from ``first`` on.

    Those come before ``start``; without any (``kept = 0``) the segment is a document of its own.
    """

    start: int
    stop: int
    first: int
    kept: int


class PackedSegments(NamedTuple):
    """The segments of all rows, one row after the other. Packed queries are the tokens, numbered through consecutive rows.

    Attributes:
        keys: int64 ``u``: the token of each packed key.
        query_ends, key_ends: int32 ``n + 1``: cumulative lengths.
        most_queries, most_keys: of a segment.
        own: int64 ``t``: the place of each token among the packed keys, in its own segment.
        shared: of each turn the packed keys ``w`` that segments see of others, and their tokens: no token twice in a turn.
            Without any, packed keys are the tokens too.
        no_random: uint64 ``2`` and ``0``: a state of random numbers for dropout, of which there is none.
    """

    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int
    own: Tensor
    shared: tuple[tuple[Tensor, Tensor], ...]
    no_random: tuple[Tensor, Tensor]


class Segments:
    """The segments of the rows of a batch; every token is in one.

    Attributes:
        number: 0-dim int64 on the host, by which compiled code finds them.
    """

    def __init__(self, rows: Sequence[Sequence[Segment]], length: int, device: torch.device) -> None:
        """Args:
        rows: the segments of each row, in order; of one row, if all rows have the same.
        length: tokens of a row.
        device: of the tensors that they are used with.

        Raises:
            ValueError: for segments that do not lie one behind the other, from a row's first token to its last.
        """
        for row in rows:
            ends = [0, *(one.stop for one in row)]
            if ends[-1] != length or any(one.start != end for one, end in zip(row, ends, strict=False)):
                raise ValueError(
                    f"segments {[(one.start, one.stop) for one in row]} of a row of {length} tokens: give them one behind the "
                    f"other, from 0 to {length}"
                )
        self.rows, self.length, self.device = tuple(tuple(row) for row in rows), length, device
        self._packed: PackedSegments | None = None
        self._seen: Tensor | None = None
        self._all: Segments | None = None
        self.number = _numbered(copy(self))

    @property
    def pairs(self) -> int:
        """Number of pairs of query and key that see each other."""
        return sum(
            (n := one.stop - one.start) * one.kept + n * (n + 1) // 2 for segments in self.rows for one in segments
        )

    def seen(self) -> Tensor:
        """Return the pairs that see each other, ``b s s`` bool: query, key."""
        if self._seen is None:
            seen = torch.zeros(len(self.rows), self.length, self.length, dtype=torch.bool)
            for row, segments in zip(seen, self.rows, strict=True):
                for start, stop, first, kept in segments:
                    row[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
                    row[start:stop, first : first + kept] = True
            self._seen = seen.to(self.device)
        return self._seen

    def of(self, rows: int) -> Segments:
        """Return the segments of this many rows.

        Raises:
            ValueError: for another number of rows than there are, unless there is one.
        """
        if rows == len(self.rows):
            return self
        if len(self.rows) != 1:
            raise ValueError(
                f"segments of {len(self.rows)} rows, for {rows}: give those of each row, or of one for all"
            )
        if self._all is None or len(self._all.rows) != rows:
            self._all = Segments(self.rows * rows, self.length, self.device)
        return self._all

    def packed(self) -> PackedSegments:
        """Return the segments of all rows, one row after the other."""
        if self._packed is None:
            self._packed = self._pack()
        return self._packed

    def _pack(self) -> PackedSegments:
        keys, own, query_ends, key_ends = [], [], [0], [0]
        turns: list[tuple[list[Tensor], list[Tensor]]] = []
        for number, segments in enumerate(self.rows):
            base, users = number * self.length, dict[int, int]()  # how many segments have seen each prompt
            for start, stop, first, kept in segments:
                mine, before = torch.arange(start, stop) + base, torch.arange(first, first + kept) + base
                at = key_ends[-1]
                keys += [before, mine]
                own.append(torch.arange(at + kept, at + kept + stop - start))
                if kept:
                    turn = users[first] = users.get(first, -1) + 1
                    if turn == len(turns):
                        turns.append(([], []))
                    turns[turn][0].append(torch.arange(at, at + kept))
                    turns[turn][1].append(before)
                query_ends.append(query_ends[-1] + stop - start)
                key_ends.append(at + kept + stop - start)
        which, places = (torch.cat(parts).to(self.device) for parts in (keys, own))
        ends = [torch.tensor(found, dtype=torch.int32).to(self.device) for found in (query_ends, key_ends)]
        shared = tuple((torch.cat(a).to(self.device), torch.cat(b).to(self.device)) for a, b in turns)
        most = [max((stop - start for start, stop in pairwise(found)), default=0) for found in (query_ends, key_ends)]
        no_random = (
            torch.zeros(2, dtype=torch.uint64, device=self.device),
            torch.zeros(0, dtype=torch.uint64, device=self.device),
        )
        return PackedSegments(which, ends[0], ends[1], most[0], most[1], places, shared, no_random)


_numbers = count()
_by_number: dict[int, tuple[StorageWeakRef, Segments]] = {}


def numbered_segments(number: Tensor) -> Segments:
    """Return the segments with this number."""
    return _by_number[int(number)][1]


def _numbered(segments: Segments) -> Tensor:
    """Return a number for segments, which are kept as long as its memory: a backward has saved it.

    Args:
        segments: that do not hold the number themselves, or it would never be released.
    """
    for number in [number for number, (memory, _) in _by_number.items() if memory.expired()]:
        del _by_number[number]
    number = next(_numbers)
    made = torch.tensor(number)
    _by_number[number] = StorageWeakRef(made.untyped_storage()), segments
    return made
