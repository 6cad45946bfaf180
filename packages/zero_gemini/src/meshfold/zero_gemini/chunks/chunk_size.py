"""Search for the chunk size that wastes the least memory.

Only the tail of a full chunk depends on its size: an item that no longer fits leaves it empty. That is counted for
every candidate, without building a layout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from meshfold.mesh.parameters import metadata
from meshfold.zero_gemini.chunks.layout import (
    SHARD_ALIGN_ELEMS,
    SLOT_ALIGN_ELEMS,
    Item,
    check_items,
    check_units,
    round_up,
)
from meshfold.zero_gemini.errors import ChunkLayoutError

# 32 to 128 MiB in bf16. Smaller chunks do not saturate PCIe or NVLink; larger ones start late and need much memory at
# once.
MIN_CHUNK_ELEMS = 16 * 2**20
MAX_CHUNK_ELEMS = 64 * 2**20
STEP_ELEMS = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSearch:
    """Result of a chunk size search.

    Attributes:
        chunk_elems: the size with the least waste; of equal ones the largest (fewest collectives).
        waste_elems: padding over all chunks of that size.
        waste_share: padding as a share of all chunks' elements, 0 to 1.
        candidates: sizes that were tried.
    """

    chunk_elems: int
    waste_elems: int
    waste_share: float
    candidates: int

    def __str__(self) -> str:
        return (
            f"chunks of {self.chunk_elems:,} elements waste {self.waste_elems:,} ({self.waste_share:.2%}), "
            f"the least of {self.candidates:,} sizes"
        )


def items_of(module: nn.Module) -> list[Item]:
    """Return a module's parameters in the order of registration, tied ones once (under the first name), empty ones not at all.

    Their group is ``(dtype, axes to sum the gradient over, trainable)``.
    """
    items = []
    for name, parameter in module.named_parameters():
        meta = metadata(parameter)
        axes = meta.sum_axes if meta is not None else ()
        if parameter.numel():
            items.append(Item(name, parameter.numel(), (parameter.dtype, axes, parameter.requires_grad)))
    return items


def search_chunk_size(
    items: nn.Module | Iterable[Item],
    shards: int = 1,
    *,
    min_elems: int = MIN_CHUNK_ELEMS,
    max_elems: int | None = None,
    step_elems: int = STEP_ELEMS,
    align_elems: int = SHARD_ALIGN_ELEMS,
    slot_align_elems: int = SLOT_ALIGN_ELEMS,
) -> ChunkSearch:
    """Return the chunk size with the least waste; of equal ones the largest, which needs the fewest collectives.

    Candidates go from ``min_elems`` to ``max_elems`` in steps, all rounded to multiples of ``shards × align_elems``. A chunk is
    never larger than the largest group. The size at which one chunk holds that whole group is the last candidate, and the only one
    if it is below ``min_elems``.

    Args:
        items: parameters in their order of use, or a module (see :func:`items_of`).
        shards: ranks that share each chunk.
        min_elems: the smallest size to try, in elements.
        max_elems: the largest; the larger of 64 Mi and four times ``min_elems`` by default.
        step_elems: from one candidate to the next.
        align_elems, slot_align_elems: as for :func:`~meshfold.zero_gemini.chunks.layout.lay_out`.

    Raises:
        ChunkLayoutError: for no items, sizes that are not positive, or a maximum below the minimum.
    """
    items = items_of(items) if isinstance(items, nn.Module) else list(items)
    check_units(shards, align_elems, slot_align_elems)
    check_items(items)
    if not items:
        raise ChunkLayoutError("no parameters to lay out in chunks: give some")
    if max_elems is None:
        max_elems = max(MAX_CHUNK_ELEMS, 4 * min_elems)
    for what, value in (("min_elems", min_elems), ("max_elems", max_elems), ("step_elems", step_elems)):
        if value <= 0:
            raise ChunkLayoutError(f"{what} is {value}: it must be at least 1")
    if max_elems < min_elems:
        raise ChunkLayoutError(f"max_elems, {max_elems:,}, is below min_elems, {min_elems:,}: swap them")

    unit = shards * align_elems
    by_group: dict[Hashable, list[int]] = {}
    for item in items:
        by_group.setdefault(item.group, []).append(round_up(item.numel, slot_align_elems))
    groups = list(by_group.values())
    tried = _candidates(groups, min_elems, max_elems, step_elems, unit)

    best, best_size = 0, -1
    for candidate in tried:
        size = sum(_size(group, candidate, unit) for group in groups)
        if best_size < 0 or size <= best_size:  # on a tie prefer the later, larger candidate
            best, best_size = candidate, size
    waste = best_size - sum(item.numel for item in items)
    return ChunkSearch(chunk_elems=best, waste_elems=waste, waste_share=waste / best_size, candidates=len(tried))


def _candidates(groups: Sequence[Sequence[int]], low: int, high: int, step: int, unit: int) -> list[int]:
    """Return the sizes to try, ascending multiples of ``unit``."""
    whole = round_up(max(sum(group) for group in groups), unit)  # one chunk for the largest group
    first = round_up(low, unit)
    last = min(max(first, high // unit * unit), whole)
    return [*range(first, last, round_up(step, unit)), last]


def _size(padded: Sequence[int], full: int, unit: int) -> int:
    """Return the elements of a group's chunks, computed item by item as ``lay_out`` does."""
    size = end = 0
    for numel in padded:
        if numel > full:
            size += -(-numel // unit) * unit
        else:
            end += numel
            if end > full:
                size += full
                end = numel
    return size + -(-end // unit) * unit


def even_chunk_size(numels: Sequence[int], most: int) -> int:
    """Return the least size with which items in order fill as few chunks as with chunks of ``most`` elements: even ones.

    Args:
        numels: elements of each item, in order of use; one above ``most`` gets a chunk of its own.
        most: elements of a chunk, at most.
    """
    shared = [numel for numel in numels if numel <= most]
    if not shared:
        return most
    few = _count(shared, most)
    return bisect_left(range(most), True, lo=max(shared), key=lambda size: _count(shared, size) <= few)


def _count(numels: Sequence[int], size: int) -> int:
    """Return the number of chunks of ``size`` elements that items in order fill."""
    chunks, end = 1, 0
    for numel in numels:
        end += numel
        if end > size:
            chunks, end = chunks + 1, numel
    return chunks
