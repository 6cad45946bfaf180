"""The choice of a softmax router and its sums in Triton: a program takes some tokens with all of their experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels import expert_choice as plain
from meshfold.kernels._triton import cdiv, launch, programs
from meshfold.kernels.inputs import as_rows

_WIDEST = 2048  # experts that one program holds
_ELEMENTS = 2048  # of a tile: 16 registers a thread for each of the few tiles that are alive


@triton.jit(do_not_specialize=["tokens"])
def _chosen(
    logits,
    index,
    weights,
    probabilities,
    tokens,
    experts,
    stride,
    K: tl.constexpr,
    PICKS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    real = row < tokens
    mask = real[:, None] & (column < experts)
    z = tl.load(logits + row[:, None] * stride + column, mask=mask, other=float("-inf")).to(tl.float32)
    z = tl.where(real[:, None], z, 0.0)
    e = tl.exp(z - tl.max(z, 1)[:, None])
    p = e / tl.sum(e, 1)[:, None]
    tl.store(probabilities + row[:, None] * experts + column, p, mask=mask)
    pick = tl.arange(0, PICKS)[None, :]
    kept = tl.zeros((ROWS, PICKS), dtype=tl.float32)
    # What is taken becomes -inf, so that other values, also -inf, stay above it. NaNs count as any value.
    rest = tl.where(column < experts, tl.maximum(z, -3.0e38), float("-inf"))
    for i in tl.static_range(K):
        at = tl.minimum(tl.argmax(rest, 1), experts - 1)
        taken = column == at[:, None]
        kept = tl.where(pick == i, tl.sum(tl.where(taken, p, 0.0), 1)[:, None], kept)
        tl.store(index + row * K + i, at.to(tl.int64), mask=real)
        rest = tl.where(taken, float("-inf"), rest)
    if NORMALIZE:
        kept = kept / tl.sum(kept, 1)[:, None]
    tl.store(weights + row[:, None] * K + pick, kept, mask=real[:, None] & (pick < K))


@triton.jit(do_not_specialize=["tokens"])
def _choice_gradients(
    dweights,
    dprobabilities,
    probabilities,
    index,
    dlogits,
    tokens,
    experts,
    dweights_row,
    dweights_column,
    dprobabilities_row,
    dprobabilities_column,
    K: tl.constexpr,
    PICKS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    OF_WEIGHTS: tl.constexpr,
    OF_PROBABILITIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    real = row < tokens
    mask = real[:, None] & (column < experts)
    p = tl.load(probabilities + row[:, None] * experts + column, mask=mask, other=0.0)
    whole = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if OF_PROBABILITIES:
        there = dprobabilities + row[:, None] * dprobabilities_row + column * dprobabilities_column
        whole += tl.load(there, mask=mask, other=0.0).to(tl.float32)
    if OF_WEIGHTS:
        pick = tl.arange(0, PICKS)[None, :]
        used = real[:, None] & (pick < K)
        g = tl.load(dweights + row[:, None] * dweights_row + pick * dweights_column, mask=used, other=0.0).to(
            tl.float32
        )
        if NORMALIZE:
            at = tl.load(index + row[:, None] * K + pick, mask=used, other=0)
            taken = tl.load(probabilities + row[:, None] * experts + at, mask=used, other=0.0)
            total = tl.where(real, tl.sum(taken, 1), 1.0)
            g = (g - (tl.sum(g * taken, 1) / total)[:, None]) / total[:, None]
        for i in tl.static_range(K):
            one = tl.load(index + row * K + i, mask=real, other=-1)
            own = tl.sum(tl.where(pick == i, g, 0.0), 1)
            whole += tl.where(column == one[:, None], own[:, None], 0.0)
    d = p * (whole - tl.sum(whole * p, 1)[:, None])
    tl.store(dlogits + row[:, None] * experts + column, d, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _totals(
    logits,
    probabilities,
    index,
    out,
    tokens,
    experts,
    logits_row,
    probabilities_row,
    index_row,
    index_column,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program strides over blocks of tokens and writes its sums: counts, probabilities, squares."""
    expert = tl.arange(0, COLUMNS)
    column = expert[None, :]
    counts = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        real = row < tokens
        mask = real[:, None] & (column < experts)
        z = tl.load(logits + row[:, None] * logits_row + column, mask=mask, other=float("-inf")).to(tl.float32)
        z = tl.where(real[:, None], z, 0.0)
        sums += tl.load(probabilities + row[:, None] * probabilities_row + column, mask=mask, other=0.0)
        top = tl.max(z, 1)
        most = top + tl.log(tl.sum(tl.exp(z - top[:, None]), 1))
        squares += tl.where(real, most * most, 0.0)
        for i in tl.static_range(K):
            at = tl.load(index + row * index_row + i * index_column, mask=real, other=-1)
            counts += tl.where(column == at[:, None], 1.0, 0.0)
    there = out + tl.program_id(0).to(tl.int64) * (2 * experts + 1)
    tl.store(there + expert, tl.sum(counts, 0), mask=expert < experts)
    tl.store(there + experts + expert, tl.sum(sums, 0), mask=expert < experts)
    tl.store(there + 2 * experts, tl.sum(squares, 0))


def _tile(experts: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile."""
    wide = max(2, triton.next_power_of_2(experts))
    return max(1, min(32, _ELEMENTS // wide)), wide


def chosen(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    if experts > _WIDEST:
        return plain.chosen(logits, k, normalize)
    logits = as_rows(logits)
    index = logits.new_empty(tokens, k, dtype=torch.int64)
    weights = logits.new_empty(tokens, k, dtype=torch.float32)
    probabilities = logits.new_empty(tokens, experts, dtype=torch.float32)
    rows, columns = _tile(experts)
    launch(
        _chosen,
        (cdiv(tokens, rows),),
        logits,
        logits,
        index,
        weights,
        probabilities,
        tokens,
        experts,
        logits.stride(0),
        K=k,
        PICKS=triton.next_power_of_2(k),
        NORMALIZE=normalize,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return index, weights, probabilities


def choice_gradients(
    dweights: Tensor | None, dprobabilities: Tensor | None, probabilities: Tensor, index: Tensor, normalize: bool
) -> Tensor:
    tokens, experts = probabilities.shape
    if experts > _WIDEST:
        return plain.choice_gradients(dweights, dprobabilities, probabilities, index, normalize)
    dlogits = torch.empty_like(probabilities)
    # What is not there is never read; its place needs a tensor.
    of_weights, of_all = (probabilities if d is None else d for d in (dweights, dprobabilities))
    rows, columns = _tile(experts)
    launch(
        _choice_gradients,
        (cdiv(tokens, rows),),
        probabilities,
        of_weights,
        of_all,
        probabilities,
        index,
        dlogits,
        tokens,
        experts,
        *of_weights.stride(),
        *of_all.stride(),
        K=index.shape[1],
        PICKS=triton.next_power_of_2(index.shape[1]),
        NORMALIZE=normalize,
        OF_WEIGHTS=dweights is not None,
        OF_PROBABILITIES=dprobabilities is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return dlogits


def totals(logits: Tensor, probabilities: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    if experts > _WIDEST or not tokens or probabilities.dtype is not torch.float32:
        return plain.totals(logits, probabilities, index)
    logits, probabilities = as_rows(logits), as_rows(probabilities)
    rows, columns = _tile(experts)
    parts = programs(cdiv(tokens, rows), logits, 2)
    out = logits.new_empty(parts, 2 * experts + 1, dtype=torch.float32)
    launch(
        _totals,
        (parts,),
        logits,
        logits,
        probabilities,
        index,
        out,
        tokens,
        experts,
        logits.stride(0),
        probabilities.stride(0),
        *index.stride(),
        K=index.shape[1],
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    counts, sums, squares = out.sum(0).split([experts, experts, 1])
    return counts, sums, squares.squeeze(0)
