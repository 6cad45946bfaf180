"""Masks, and the rectangles and triangles that they are cut into for attention kernels.

Any combination of masks lets a query see one interval of global key positions. A block of queries meets a block of keys. Both hold
ascending pieces of the sequence, and a query sees an interval of positions. So it sees an interval of the block's keys. From
one query to the next, neither end of the interval moves back. Between the places where an end begins or ceases to move, the
visible part of the block is a rectangle, a trapezoid or a band, and these are cut::

    first stands, stop stands      a rectangle
    first stands, stop moves       a rectangle and a "lower" triangle (causal: query x sees keys 0 to x of the tile)
    first moves, stop stands       an "upper" triangle (query x sees keys x to the end of the tile) and a rectangle
    both move                      bands of that width, each an upper and a lower triangle

So the two halves of a zigzag are tiled as halves: fully masked parts cost nothing, and a diagonal block of two pieces is
one triangle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from meshfold.sequence.sharding import Pieces, SequenceSharding

Shape = Literal["full", "lower", "upper"]


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A mask over a sequence of ``length`` tokens.

    Attributes:
        length: tokens of the sequence; later tokens are padding: they attend to nothing, and no token attends to them.
        causal: a token sees no later one.
        window: a token sees those less than ``window`` away: itself and window - 1 earlier ones (and as many
            later ones if the mask is not causal). None: all.
        documents: cumulative lengths of packed documents; a token sees only its own. None: one document.
    """

    length: int
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def visible(self, position: int) -> tuple[int, int]:
        """Return the interval [first, stop) of keys that the query at ``position`` sees; empty for padding."""
        if position >= self.length:
            return (self.length, self.length)
        first, stop = 0, self.length
        if self.documents is not None:
            document = bisect_right(self.documents, position) - 1
            first, stop = self.documents[document], self.documents[document + 1]
        if self.causal:
            stop = min(stop, position + 1)
        if self.window is not None:
            first = max(first, position - self.window + 1)
            stop = min(stop, position + self.window)
        return first, stop


def dense(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the mask as a bool tensor ``s, t -> s t``: the keys at these positions that each query sees."""
    i, j = queries.unsqueeze(-1), keys.unsqueeze(0)
    seen = (i < mask.length) & (j < mask.length)
    if mask.causal:
        seen &= j <= i
    if mask.window is not None:
        seen &= (i - j).abs() < mask.window
    if mask.documents is not None:
        bounds = torch.tensor(mask.documents, dtype=torch.int64, device=queries.device)
        seen &= torch.searchsorted(bounds, i, right=True) == torch.searchsorted(bounds, j, right=True)
    return seen


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries [q, q + rows) against keys [k, k + columns) of two blocks; triangles have equally many rows and columns."""

    shape: Shape
    q: int
    k: int
    rows: int
    columns: int

    @property
    def work(self) -> int:
        """Number of (query, key) pairs that are computed."""
        return self.rows * self.columns if self.shape == "full" else self.rows * (self.rows + 1) // 2


@dataclass(slots=True)
class _Run:
    """Queries [start, start + rows) see keys [first, stop). Each end stays (0), moves by one per row (1), or is unknown (None)
    for a single row."""

    start: int
    rows: int
    first: int
    stop: int
    first_moves: int | None
    stop_moves: int | None

    def joins(self, other: _Run) -> bool:
        """Extend by the following rows and return True if the ends continue in the same way."""
        first = _continued(self.first, self.first_moves, self.rows, other.first, other.first_moves)
        stop = _continued(self.stop, self.stop_moves, self.rows, other.stop, other.stop_moves)
        if first is None or stop is None:
            return False
        self.rows += other.rows
        self.first_moves, self.stop_moves = first, stop
        return True


def tiles(queries: Pieces, keys: Pieces, mask: Mask) -> tuple[Tile, ...]:
    """Return the tiles that cover exactly what queries at these pieces see of keys at those, each pair once."""
    found: list[Tile] = []
    for run in _runs(queries, keys, mask):
        found.extend(_cut(run))
    return tuple(found)


def _continued(value: int, moves: int | None, rows: int, then: int, then_moves: int | None) -> int | None:
    """Return how an end moves over two runs of rows; None if they differ."""
    if moves is None:
        moves = then - value if rows == 1 else 0
    if moves not in (0, 1) or then != value + moves * rows or then_moves not in (None, moves):
        return None
    return moves


def _runs(queries: Pieces, keys: Pieces, mask: Mask) -> Iterator[_Run]:
    offsets = []  # number of keys before each piece
    held = 0
    for start, stop in keys:
        offsets.append(held)
        held += stop - start

    def place(position: int) -> int:
        """Return the number of keys of the block before a global position."""
        for (start, stop), offset in zip(keys, offsets, strict=True):
            if position < stop:
                return offset + max(position - start, 0)
        return held

    def ends(position: int) -> tuple[int, int]:
        first, stop = mask.visible(position)
        return place(first), place(stop)

    run: _Run | None = None
    passed = 0
    marks = _marks(keys, mask)
    for start, stop in queries:
        bounds = sorted({start, stop, *(mark for mark in marks if start < mark < stop)})
        for low, high in pairwise(bounds):
            (first, end), rows = ends(low), high - low
            moves: tuple[int | None, int | None] = (None, None)
            if rows > 1:
                then = ends(low + 1)
                moves = (then[0] - first, then[1] - end)
            piece = _Run(passed + low - start, rows, first, end, *moves)
            if run is None or not run.joins(piece):
                if run is not None:
                    yield run
                run = piece
        passed += stop - start
    if run is not None:
        yield run


def _marks(keys: Pieces, mask: Mask) -> tuple[int, ...]:
    """Return the query positions at which an end of the visible range may begin or cease to move."""
    edges = {0, mask.length, *(edge for piece in keys for edge in piece), *(mask.documents or ())}
    window = mask.window or 0
    shifts = {0, -1, 1, window - 1, window, -window, 1 - window}
    return tuple(sorted({edge + shift for edge in edges for shift in shifts}))


def _cut(run: _Run) -> Iterator[Tile]:
    start, rows, first, stop = run.start, run.rows, run.first, run.stop
    if run.first_moves and run.stop_moves:
        yield from _band(start, rows, first, stop)
    elif run.stop_moves:
        if (blind := max(0, first - stop + 1)) > 0:  # the first rows see no keys
            start, rows, stop = start + blind, rows - blind, stop + blind
        if rows > 0:
            if stop - 1 > first:
                yield Tile("full", start, first, rows, stop - 1 - first)
            yield Tile("lower", start, stop - 1, rows, rows)
    elif run.first_moves:
        rows = min(rows, stop - first)  # the last rows see no keys
        if rows > 0:
            yield Tile("upper", start, first, rows, rows)
            if stop > first + rows:
                yield Tile("full", start, first + rows, rows, stop - first - rows)
    elif stop > first:
        yield Tile("full", start, first, rows, stop - first)


def _band(start: int, rows: int, first: int, stop: int) -> Iterator[Tile]:
    width = stop - first
    if width < 1:
        return
    if width == 1:  # each query sees one key: the diagonal
        for row in range(rows):
            yield Tile("full", start + row, first + row, 1, 1)
        return
    for done in range(0, rows, width - 1):
        high = min(width - 1, rows - done)
        left, right = first + done, stop + done
        yield Tile("upper", start + done, left, high, high)
        if right - 1 > left + high:
            yield Tile("full", start + done, left + high, high, right - 1 - left - high)
        yield Tile("lower", start + done, right - 1, high, high)


Steps = tuple[tuple[Tile, ...], ...]


def steps(sharding: SequenceSharding, mask: Mask, index: int) -> Steps:
    """Return the tiles of each step of the ring at position ``index``.

    At step t a rank has the keys of place ``(index - t) mod ring``: keys and values travel to the next place. Steps end when no
    place has work left: in contiguous order a window shorter than a share takes two. A step whose tiles are masked away is an empty
    tuple.
    """
    if torch.compiler.is_compiling():  # pure Python can be traced; dynamo would warn about caches
        return _steps(sharding, mask, index, _at)
    return _kept_steps(sharding, mask, index)


def work(sharding: SequenceSharding, mask: Mask, index: int) -> int:
    """Return the number of (query, key) pairs that the place ``index`` of the ring computes per head."""
    return sum(tile.work for step in steps(sharding, mask, index) for tile in step)


def _steps(
    sharding: SequenceSharding,
    mask: Mask,
    index: int,
    at: Callable[[SequenceSharding, Mask, int, int], tuple[Tile, ...]],
) -> Steps:
    places = range(sharding.ring)
    last = sharding.ring - 1
    while last > 0 and not any(at(sharding, mask, place, last) for place in places):
        last -= 1  # no rank has work in this step
    return tuple(at(sharding, mask, index, step) for step in places[: last + 1])


def _at(sharding: SequenceSharding, mask: Mask, index: int, step: int) -> tuple[Tile, ...]:
    source = (index - step) % sharding.ring
    return tiles(sharding.ring_pieces(index), sharding.ring_pieces(source), mask)


_kept_at = lru_cache(maxsize=4096)(_at)


@lru_cache(maxsize=1024)
def _kept_steps(sharding: SequenceSharding, mask: Mask, index: int) -> Steps:
    return _steps(sharding, mask, index, _kept_at)
