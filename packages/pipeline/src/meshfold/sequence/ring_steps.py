"""What each rank of a ring computes at each step: pure, and known to all."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from meshfold.sequence.mask import Mask
from meshfold.sequence.sharding import SequenceSharding
from meshfold.sequence.tiling import Tile, tiles

Steps = tuple[tuple[Tile, ...], ...]


def steps(dealing: SequenceSharding, mask: Mask, index: int) -> Steps:
    """The tiles of each step of the ring at place ``index``.

    At step t the keys are those of place ``(index - t) mod ring``: keys and values travel to the next place. There
    are as many steps as some place has work for, so that a window shorter than a share is two steps in contiguous
    order; a step whose tiles are masked away is an empty tuple.
    """
    if torch.compiler.is_compiling():  # pure Python is traced through; caches would only be warned about
        return _steps(dealing, mask, index, _at)
    return _kept_steps(dealing, mask, index)


def work(dealing: SequenceSharding, mask: Mask, index: int) -> int:
    """How many (query, key) pairs the place ``index`` of the ring computes, a head."""
    return sum(tile.work for step in steps(dealing, mask, index) for tile in step)


def _steps(
    dealing: SequenceSharding,
    mask: Mask,
    index: int,
    at: Callable[[SequenceSharding, Mask, int, int], tuple[Tile, ...]],
) -> Steps:
    places = range(dealing.ring)
    last = dealing.ring - 1
    while last > 0 and not any(at(dealing, mask, place, last) for place in places):
        last -= 1  # nobody has work that late
    return tuple(at(dealing, mask, index, step) for step in places[: last + 1])


def _at(dealing: SequenceSharding, mask: Mask, index: int, step: int) -> tuple[Tile, ...]:
    source = (index - step) % dealing.ring
    return tiles(dealing.ring_pieces(index), dealing.ring_pieces(source), mask)


_kept_at = lru_cache(maxsize=4096)(_at)


@lru_cache(maxsize=1024)
def _kept_steps(dealing: SequenceSharding, mask: Mask, index: int) -> Steps:
    return _steps(dealing, mask, index, _kept_at)
