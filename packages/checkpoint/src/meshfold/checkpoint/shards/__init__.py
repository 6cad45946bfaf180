"""Rectangles of a whole tensor that this rank keeps, and those that it writes: arithmetic, no communication.

A rank's block of a tensor is some rectangles of the whole (:meth:`meshfold.mesh.placement.Placement.rectangles`). Under
``zero`` it keeps a flat run of that block. In a matrix, such a run is at most three rectangles: the end of a row, whole rows,
and the beginning of a row. Ranks that keep the same rectangle divide it by rows, or choose one by hash if it is small; each
computes the assignment from the mesh alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meshfold.mesh import Mesh, Placement
from meshfold.mesh.parameters import ParameterMeta

__all__ = [
    "Shard",
    "ShardRule",
    "Window",
    "narrowed",
    "no_shards",
    "overlap",
    "ranks_with_same_index",
    "shards_of_flat_run",
    "shards_of_local",
    "shards_of_replicated",
    "windows_of_block",
]

LEAST_SPLIT_BYTES = 2**20
"""Of a rectangle, before the ranks that keep it write rows of it each."""

Window = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in elements, per dim."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rectangle that this rank writes.

    Attributes:
        offsets: in the whole tensor, in elements, per dim.
        sizes: the same.
        view: returns it from the tensor that the rank keeps.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    view: Callable[[Tensor], Tensor]


class ShardRule(NamedTuple):
    """A rule for a rank's shards of a tensor, as a value: equal rules give equal shards for a name.

    Attributes:
        function: returns the pieces for a name and the arguments, and depends on nothing else that may change.
        arguments: values, none of them a tensor.
    """

    function: Callable[..., tuple[Shard, ...]]
    arguments: tuple[object, ...] = ()

    def shards(self, name: str) -> tuple[Shard, ...]:
        """Return the shards that this rank writes of the tensor with that name."""
        return self.function(name, *self.arguments)


def no_shards(name: str) -> tuple[Shard, ...]:
    """Return no shards: the rank keeps nothing of the tensor."""
    return ()


def shards_of_local(name: str, shape: Sequence[int], meta: ParameterMeta, dtype: torch.dtype) -> tuple[Shard, ...]:
    """Return the shards that this rank writes of a tensor with a local part; ``shape``: of that part."""
    whole = (0,) * len(shape), tuple(shape)
    return tuple(_pieces(name, [(whole, lambda kept: kept)], meta, (), dtype.itemsize))


def shards_of_flat_run(
    name: str,
    run: range,
    shape: Sequence[int],
    meta: ParameterMeta,
    dtype: torch.dtype,
    over: tuple[str, ...],
) -> tuple[Shard, ...]:
    """Return the shards that this rank writes of a tensor with a flat run of its local part, row by row.

    Args:
        name: of the tensor.
        run: range of elements.
        shape: of the block.
        meta: of the block.
        dtype: of the tensor.
        over: axes whose ranks have the block's other runs.
    """
    boxes = []
    for start, (offsets, sizes) in windows_of_run(tuple(shape), run.start, len(run)):
        count = math.prod(sizes)

        def view(kept: Tensor, start: int = start, count: int = count, sizes: tuple[int, ...] = sizes) -> Tensor:
            return kept.reshape(-1)[start : start + count].view(sizes)

        boxes.append(((offsets, sizes), view))
    return tuple(_pieces(name, boxes, meta, over, dtype.itemsize))


def shards_of_replicated(name: str, shape: Sequence[int], ranks: Sequence[int], rank: int) -> tuple[Shard, ...]:
    """Return the shard that this rank writes of a tensor that some ranks have whole; one of them writes it."""
    piece = Shard(offsets=(0,) * len(shape), sizes=tuple(shape), view=lambda kept: kept)
    return (piece,) if rank == _drawn(name, ranks) else ()


def windows_of_block(meta: ParameterMeta, run: range | None = None) -> list[tuple[Window, Window]]:
    """Return the rectangles of a whole tensor that this rank has, each with its place in the rank's block.

    Unlike the shards, which are divided among ranks that have the same, these are all that this rank has.

    Args:
        meta: of the block.
        run: the elements of the block that it keeps; None: all.
    """
    shape = meta.placement.local_shape(meta.mesh)
    kept = [((0,) * len(shape), shape)]
    if run is not None:
        kept = [window for _, window in windows_of_run(shape, run.start, len(run))]
    found = []
    for rectangle in meta.placement.rectangles(meta.mesh):
        shift = [there - here for there, here in zip(rectangle.offsets, rectangle.local_offsets, strict=True)]
        for window in kept:
            inside = overlap(window, (rectangle.local_offsets, rectangle.sizes))
            if inside is not None:
                offsets = tuple(here + by for here, by in zip(inside[0], shift, strict=True))
                found.append(((offsets, inside[1]), inside))
    return found


def windows_of_run(shape: tuple[int, ...], start: int, length: int) -> Iterator[tuple[int, Window]]:
    """Yield a flat run of a local tensor as rectangles, each with its offset in the run: at most three for a matrix.

    >>> [window for _, window in windows_of_run((4, 5), 3, 9)]
    [((0, 3), (1, 2)), ((1, 0), (1, 5)), ((2, 0), (1, 2))]
    """
    if not length:
        return
    if not shape:
        yield 0, ((), ())
        return
    inner = math.prod(shape[1:])
    done = 0
    while done < length:
        row, within = divmod(start + done, inner)
        rows = 0 if within else (length - done) // inner
        if rows:
            yield done, ((row, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))
            done += rows * inner
            continue
        some = min(inner - within, length - done)
        for at, (offsets, sizes) in windows_of_run(shape[1:], within, some):
            yield done + at, ((row, *offsets), (1, *sizes))
        done += some


def overlap(a: Window, b: Window) -> Window | None:
    """Return the intersection of two rectangles; None if it is empty."""
    starts = tuple(map(max, a[0], b[0]))
    sizes = tuple(min(p + n, q + m) - start for p, n, q, m, start in zip(a[0], a[1], b[0], b[1], starts, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a window of a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _pieces(
    name: str,
    boxes: Sequence[tuple[Window, Callable[[Tensor], Tensor]]],
    meta: ParameterMeta,
    over: tuple[str, ...],
    width: int,
) -> Iterator[Shard]:
    """Yield the shards that this rank writes; ``boxes``: rectangles of its local part, with their views."""
    keepers = _keepers(meta, over)
    for rectangle in meta.placement.rectangles(meta.mesh):
        ranks = keepers[rectangle.offsets, rectangle.sizes]
        mine = _mine(name, (rectangle.offsets, rectangle.sizes), ranks, meta.mesh.rank, width)
        if mine is None:
            continue
        shift = [at - local for at, local in zip(rectangle.offsets, rectangle.local_offsets, strict=True)]
        for (offsets, sizes), view in boxes:
            there = tuple(at + by for at, by in zip(offsets, shift, strict=True)), sizes
            found = overlap(there, mine)
            if found is not None:
                inner = tuple(at - begin for at, begin in zip(found[0], there[0], strict=True))

                def cut(
                    kept: Tensor,
                    view: Callable[[Tensor], Tensor] = view,
                    inner: tuple[int, ...] = inner,
                    sizes: tuple[int, ...] = found[1],
                ) -> Tensor:
                    return narrowed(view(kept), inner, sizes)

                yield Shard(offsets=found[0], sizes=found[1], view=cut)


def _mine(name: str, window: Window, ranks: Sequence[int], rank: int, width: int) -> Window | None:
    """Return the part of a rectangle that this rank writes; the ranks that hold the rectangle divide it."""
    offsets, sizes = window
    if len(ranks) == 1:
        return window
    if not sizes or sizes[0] < len(ranks) or math.prod(sizes) * width < LEAST_SPLIT_BYTES:
        return window if rank == _drawn(f"{name}{offsets}", ranks) else None
    place, rows = ranks.index(rank), sizes[0]
    begin, end = place * rows // len(ranks), (place + 1) * rows // len(ranks)
    return (offsets[0] + begin, *offsets[1:]), (end - begin, *sizes[1:])


def _drawn(name: str, ranks: Sequence[int]) -> int:
    """Choose a rank by a name; all ranks choose the same one."""
    return ranks[zlib.crc32(name.encode()) % len(ranks)]


# Weak keys: an entry goes away with its mesh.
_known: WeakKeyDictionary[Mesh, dict[object, dict[Window, list[int]]]] = WeakKeyDictionary()


def _keepers(meta: ParameterMeta, over: tuple[str, ...]) -> dict[Window, list[int]]:
    """Return the ranks that hold each rectangle of a tensor, among those with this rank's index on the axes ``over``.

    If stages of a pipeline share a tensor, only ranks of this rank's stage count.
    """
    alike = (*over, *meta.only_at)
    known, key = _known.setdefault(meta.mesh, {}), (_key(meta.placement), alike)
    if key not in known:
        found: dict[Window, list[int]] = {}
        for rank in ranks_with_same_index(meta.mesh, alike):
            for rectangle in meta.placement.rectangles(meta.mesh, rank):
                found.setdefault((rectangle.offsets, rectangle.sizes), []).append(rank)
        known[key] = found
    return known[key]


def ranks_with_same_index(mesh: Mesh, axes: Sequence[str]) -> list[int]:
    """Return the ranks with the same index as this one on some axes."""
    here = mesh.index(*axes)
    return [rank for rank in range(mesh.world_size) if mesh.index(*axes, rank=rank) == here]


def _key(placement: Placement) -> object:
    """Return a key that is equal for equivalent placements."""
    return placement.shape, placement.axes, tuple(placement.parts.items()), tuple(placement.multiple.items())
