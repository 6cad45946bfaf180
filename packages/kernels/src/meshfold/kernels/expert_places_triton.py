"""Positions of (token, expert) pairs by counting, in Triton: runs of tokens are counted, the counts added up, then pairs placed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.expert_places import placed as plain_placed

_ELEMENTS = 4096  # of a tile of tokens and experts
_STEPS = 4  # tiles of a run
_WIDEST = 4096  # experts that one program holds


@triton.jit
def _named(index, row, i, tokens, experts, row_stride, column_stride):
    """Return the i-th experts of some tokens; -1 for numbers of no expert and tokens that do not exist."""
    at = tl.load(index + row * row_stride + i * column_stride, mask=row < tokens, other=-1)
    return tl.where((at >= 0) & (at < experts), at, -1).to(tl.int32)


@triton.jit(do_not_specialize=["tokens"])
def _count(
    index,
    counts,
    tokens,
    experts,
    row_stride,
    column_stride,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count the pairs of each expert in a run of tokens: ``counts [runs, e]``."""
    expert = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        for i in tl.static_range(K):
            at = _named(index, row, i, tokens, experts, row_stride, column_stride)
            total += (expert[None, :] == at[:, None]).to(tl.int32)
    there = counts + tl.program_id(0).to(tl.int64) * experts + expert
    tl.store(there, tl.sum(total, 0), mask=expert < experts)


@triton.jit(do_not_specialize=["runs"])
def _add_up(counts, totals, runs, experts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace the counts of some experts by the sums of the runs before, and write the sums of all."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in range(0, runs, ROWS):
        run = start + tl.arange(0, ROWS)
        mask = (run < runs)[:, None] & (expert < experts)[None, :]
        there = counts + run.to(tl.int64)[:, None] * experts + expert[None, :]
        own = tl.load(there, mask=mask, other=0)
        tl.store(there, tl.cumsum(own, 0) - own + before[None, :], mask=mask)
        before += tl.sum(own, 0)
    tl.store(totals + expert, before, mask=expert < experts)


@triton.jit(do_not_specialize=["tokens"])
def _place(
    index,
    before,
    totals,
    places,
    pairs,
    ends,
    tokens,
    experts,
    row_stride,
    column_stride,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Place the pairs of a run of tokens."""
    expert = tl.arange(0, COLUMNS)
    exists = expert < experts
    total = tl.load(totals + expert, mask=exists, other=0)
    end = tl.cumsum(total, 0)
    if tl.program_id(0) == 0:
        tl.store(ends + expert, end, mask=exists)
    # The next free row of each expert.
    there = before + tl.program_id(0).to(tl.int64) * experts + expert
    free = end - total + tl.load(there, mask=exists, other=0)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        own = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
        for i in tl.static_range(K):
            at = _named(index, row, i, tokens, experts, row_stride, column_stride)
            own += (expert[None, :] == at[:, None]).to(tl.int32)
        # Of each token: the row of its next pair with an expert.
        following = tl.cumsum(own, 0) - own + free[None, :]
        for i in tl.static_range(K):
            at = _named(index, row, i, tokens, experts, row_stride, column_stride)
            here = expert[None, :] == at[:, None]
            place = tl.sum(tl.where(here, following, 0), 1)
            following += here.to(tl.int32)
            tl.store(places + row * K + i, tl.where(at >= 0, place, -1).to(tl.int64), mask=row < tokens)
            tl.store(pairs + place, row * K + i, mask=at >= 0)
        free += tl.sum(own, 0)


def placed(index: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, each = index.shape
    if experts > _WIDEST:
        return plain_placed(index, experts, rows)
    wide = max(2, triton.next_power_of_2(experts))
    high = max(1, min(64, _ELEMENTS // wide))
    runs = cdiv(tokens, high * _STEPS)
    places = index.new_empty(tokens, each, dtype=torch.int64)
    pairs = index.new_zeros(rows, dtype=torch.int64)
    counts = index.new_empty(runs, experts, dtype=torch.int32)
    totals, ends = (index.new_empty(experts, dtype=torch.int32) for _ in range(2))
    tiles = dict(K=each, STEPS=_STEPS, ROWS=high, COLUMNS=wide, num_warps=4)
    launch(_count, (runs,), index, index, counts, tokens, experts, *index.stride(), **tiles)
    tall = min(128, triton.next_power_of_2(runs))
    launch(_add_up, (cdiv(experts, 16),), index, counts, totals, runs, experts, ROWS=tall, COLUMNS=16, num_warps=4)
    launch(
        _place,
        (runs,),
        index,
        index,
        counts,
        totals,
        places,
        pairs,
        ends,
        tokens,
        experts,
        *index.stride(),
        **tiles,
    )
    return places, pairs, ends
