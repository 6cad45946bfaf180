"""Positions of (token, expert) pairs by counting, in Triton: runs of pairs are counted, the counts added up, then pairs placed.

A run is short, so that a GPU has many of them at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch

_RUN = 256  # pairs of a run
_BLOCK = 32  # pairs of a run that others are compared with at a time
_EXPERTS = 128  # that a run is counted for at a time
_TALL = 512  # runs that are added up at a time


@triton.jit
def _named(index, pair, count, experts, row_stride, column_stride, K: tl.constexpr):
    """Return the experts of some pairs; -1 for numbers of no expert and pairs that do not exist."""
    at = tl.load(index + pair // K * row_stride + pair % K * column_stride, mask=pair < count, other=-1)
    return tl.where((at >= 0) & (at < experts), at, -1).to(tl.int32)


@triton.jit(do_not_specialize=["count", "rows"])
def _count(
    index,
    counts,
    totals,
    pairs,
    count,
    rows,
    experts,
    row_stride,
    column_stride,
    K: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count the pairs of each expert in a run, ``counts [runs, e]``, add them to ``totals [e]``, and fill ``pairs`` with zeros."""
    run = tl.program_id(0).to(tl.int64)
    for first in range(0, experts, COLUMNS):
        expert = first + tl.arange(0, COLUMNS)
        found = tl.zeros((BLOCK, COLUMNS), dtype=tl.int32)
        for start in range(0, RUN, BLOCK):
            pair = run * RUN + start + tl.arange(0, BLOCK)
            at = _named(index, pair, count, experts, row_stride, column_stride, K)
            found += (expert[None, :] == at[:, None]).to(tl.int32)
        own = tl.sum(found, 0)
        tl.store(counts + run * experts + expert, own, mask=expert < experts)
        tl.atomic_add(totals + expert, own, mask=(expert < experts) & (own > 0), sem="relaxed")
    each = tl.cdiv(rows, tl.num_programs(0))
    for start in range(0, each, RUN):
        own = start + tl.arange(0, RUN)
        row = run * each + own
        tl.store(pairs + row, tl.zeros((RUN,), dtype=tl.int64), mask=(own < each) & (row < rows))


@triton.jit(do_not_specialize=["runs"])
def _add_up(counts, totals, ends, runs, experts, TALL: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace the counts of some experts by the row of the first pair of each run, and write the rows after their last."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = expert < experts
    free = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(0, experts, WIDE):
        other = first + tl.arange(0, WIDE)
        total = tl.load(totals + other, mask=other < experts, other=0)
        free += tl.sum(tl.where(other[None, :] < expert[:, None], total[None, :], 0), 1)
    for start in range(0, runs, TALL):
        run = start + tl.arange(0, TALL)
        mask = (run < runs)[:, None] & exists[None, :]
        there = counts + run.to(tl.int64)[:, None] * experts + expert[None, :]
        own = tl.load(there, mask=mask, other=0)
        tl.store(there, tl.cumsum(own, 0) - own + free[None, :], mask=mask)
        free += tl.sum(own, 0)
    tl.store(ends + expert, free, mask=exists)


@triton.jit(do_not_specialize=["count"])
def _place(
    index,
    free,
    places,
    pairs,
    count,
    experts,
    row_stride,
    column_stride,
    K: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Place the pairs of a run: each after those of its expert that are before it in the run."""
    run = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, RUN)
    pair = run * RUN + own
    at = _named(index, pair, count, experts, row_stride, column_stride, K)
    place = tl.load(free + run * experts + at, mask=at >= 0, other=0)
    before = tl.zeros((RUN, BLOCK), dtype=tl.int32)
    for start in range(0, RUN, BLOCK):
        other = start + tl.arange(0, BLOCK)
        of_other = _named(index, run * RUN + other, count, experts, row_stride, column_stride, K)
        before += ((of_other[None, :] == at[:, None]) & (other[None, :] < own[:, None])).to(tl.int32)
    place += tl.sum(before, 1)
    tl.store(places + pair, tl.where(at >= 0, place, -1).to(tl.int64), mask=pair < count)
    tl.store(pairs + place, pair, mask=at >= 0)


def placed(index: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, each = index.shape
    count = tokens * each
    runs = cdiv(count, _RUN)
    places = index.new_empty(tokens, each, dtype=torch.int64)
    pairs = index.new_empty(rows, dtype=torch.int64)
    counts = index.new_empty(runs, experts, dtype=torch.int32)
    totals = index.new_zeros(experts, dtype=torch.int32)
    ends = torch.empty_like(totals)
    tiles = dict(K=each, RUN=_RUN, BLOCK=_BLOCK)
    wide = max(2, min(_EXPERTS, triton.next_power_of_2(experts)))
    launch(
        _count,
        (runs,),
        index,
        index,
        counts,
        totals,
        pairs,
        count,
        rows,
        experts,
        *index.stride(),
        COLUMNS=wide,
        num_warps=4,
        **tiles,
    )
    tall = min(_TALL, triton.next_power_of_2(runs))
    launch(
        _add_up,
        (cdiv(experts, 4),),
        index,
        counts,
        totals,
        ends,
        runs,
        experts,
        TALL=tall,
        WIDE=wide,
        COLUMNS=4,
        num_warps=4,
    )
    launch(
        _place,
        (runs,),
        index,
        index,
        counts,
        places,
        pairs,
        count,
        experts,
        *index.stride(),
        num_warps=8,
        **tiles,
    )
    return places, pairs, ends
