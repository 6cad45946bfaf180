"""Tokens copied into rows and summed back in Triton: a program takes some tokens with all of their rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels import token_rows as plain
from meshfold.kernels._triton import cdiv, launch, tile
from meshfold.kernels.inputs import as_rows

_WIDEST = 65536  # columns per program


@triton.jit(do_not_specialize=["tokens"])
def _take(
    x,
    places,
    weights,
    y,
    of_rows,
    tokens,
    columns,
    each,
    x_row,
    y_row,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # By tokens: each is read once. Rows in their own order would read it from memory for each of its experts: all
    # tokens together do not stay in the L2 cache from one expert to the next.
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    real = token < tokens
    value = tl.load(x + token[:, None] * x_row + column, mask=real[:, None] & (column < columns))
    for i in range(each):
        place = tl.load(places + token * each + i, mask=real, other=-1).to(tl.int64)
        tl.store(y + place[:, None] * y_row + column, value, mask=(place >= 0)[:, None] & (column < columns))
        if WEIGHTED:
            weight = tl.load(weights + token * each + i, mask=real)
            tl.store(of_rows + place, weight, mask=place >= 0)


@triton.jit
def _row(rows, weights, pair, place, column, columns, rows_row, WEIGHTED: tl.constexpr):
    """The row at each place in float32, times the weight of its pair; 0 where a place is -1."""
    named = place >= 0
    mask = named[:, None] & (column < columns)
    x = tl.load(rows + place[:, None] * rows_row + column, mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        x = x * tl.load(weights + pair, mask=named, other=0.0).to(tl.float32)[:, None]
    return x


@triton.jit(do_not_specialize=["tokens"])
def _sum(
    rows,
    places,
    weights,
    y,
    of_rows,
    of_places,
    tokens,
    columns,
    each,
    rows_row,
    y_row,
    WEIGHTED: tl.constexpr,
    NUMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    real = token < tokens
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for i in range(each):
        place = tl.load(places + token * each + i, mask=real, other=-1)
        total += _row(rows, weights, token * each + i, place, column, columns, rows_row, WEIGHTED)
        if NUMBERS:  # of rows, copied to their places
            number = tl.load(of_rows + place, mask=place >= 0, other=0.0)
            tl.store(of_places + token * each + i, number, mask=real)
    tl.store(y + token[:, None] * y_row + column, total.to(y.dtype.element_ty), mask=real[:, None] & (column < columns))


@triton.jit(do_not_specialize=["tokens"])
def _add(
    rows,
    places,
    weights,
    y,
    tokens,
    columns,
    each,
    rows_row,
    y_row,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    real = token < tokens
    last = tl.full((ROWS,), -1, dtype=tl.int64)
    for i in range(each):
        last = tl.maximum(last, tl.load(places + token * each + i, mask=real, other=-1).to(tl.int64))
    if tl.max(last, 0) >= 0:
        changed = (last >= 0)[:, None] & (column < columns)
        there = y + token[:, None] * y_row + column
        total = tl.load(there, mask=changed, other=0.0).to(tl.float32)
        for i in range(each):
            place = tl.load(places + token * each + i, mask=real, other=-1).to(tl.int64)
            total += _row(rows, weights, token * each + i, place, column, columns, rows_row, WEIGHTED)
        tl.store(there, total.to(y.dtype.element_ty), mask=changed)


@triton.jit(do_not_specialize=["count"])
def _sum_gradients(
    dy,
    rows,
    pairs,
    places,
    weights,
    drows,
    dweights,
    count,
    columns,
    each,
    dy_row,
    rows_row,
    drows_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    real = row < count
    pair = tl.load(pairs + row, mask=real, other=0)
    named = real & (tl.load(places + pair, mask=real, other=-1) == row)
    mask = named[:, None] & (column < columns)
    g = tl.load(dy + (pair // each)[:, None] * dy_row + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(rows + row[:, None] * rows_row + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weights + pair, mask=named, other=0.0).to(tl.float32)
    # Rows and pairs correspond one to one, so no other program writes here.
    tl.store(dweights + pair, tl.sum(g * x, 1).to(dweights.dtype.element_ty), mask=named)
    there = drows + row[:, None] * drows_row + column
    tl.store(there, (g * weight[:, None]).to(drows.dtype.element_ty), mask=real[:, None] & (column < columns))


def taken(x: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
    if x.shape[1] > _WIDEST:
        return plain.taken(x, pairs, places)
    return _take_rows(x, None, pairs, places)[0]


def taken_weighted(x: Tensor, weights: Tensor, pairs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[1] > _WIDEST:
        return plain.taken_weighted(x, weights, pairs, places)
    return _take_rows(x, weights.contiguous(), pairs, places)


def _take_rows(x: Tensor, weights: Tensor | None, pairs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows, and their weights if there are weights."""
    x = as_rows(x)
    tokens, each = places.shape
    y = x.new_empty(pairs.shape[0], x.shape[1])
    of_rows = y if weights is None else weights.new_empty(pairs.shape[0])
    high, wide, warps = tile(x.shape[1])
    launch(
        _take,
        (cdiv(tokens, high),),
        x,
        x,
        places.contiguous(),
        x if weights is None else weights,
        y,
        of_rows,
        tokens,
        x.shape[1],
        each,
        x.stride(0),
        y.stride(0),
        WEIGHTED=weights is not None,
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
    return y, of_rows


def summed(rows: Tensor, pairs: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    if rows.shape[1] > _WIDEST:
        return plain.summed(rows, pairs, places, weights)
    return _sum_rows(rows, places, weights, None)[0]


def add_summed(y: Tensor, rows: Tensor, pairs: Tensor, places: Tensor, weights: Tensor | None) -> None:
    if rows.shape[1] > _WIDEST:
        return plain.add_summed(y, rows, pairs, places, weights)
    rows = as_rows(rows)
    tokens, each = places.shape
    high, wide, warps = tile(rows.shape[1])
    launch(
        _add,
        (cdiv(tokens, high),),
        rows,
        rows,
        places.contiguous(),
        places if weights is None else weights.contiguous(),
        y,
        tokens,
        rows.shape[1],
        each,
        rows.stride(0),
        y.stride(0),
        WEIGHTED=weights is not None,
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
    return None


def weighted_take_gradients(dy: Tensor, dof_rows: Tensor, pairs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    if dy.shape[1] > _WIDEST:
        return plain.weighted_take_gradients(dy, dof_rows, pairs, places)
    return _sum_rows(dy, places, None, dof_rows.contiguous())


def _sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None, of_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums, and the numbers of rows at their places if there are numbers."""
    rows = as_rows(rows)
    tokens, each = places.shape
    y = rows.new_empty(tokens, rows.shape[1])
    of_places = y if of_rows is None else of_rows.new_empty(tokens, each)
    high, wide, warps = tile(rows.shape[1])
    launch(
        _sum,
        (cdiv(tokens, high),),
        rows,
        rows,
        places.contiguous(),
        places if weights is None else weights.contiguous(),
        y,
        y if of_rows is None else of_rows,
        of_places,
        tokens,
        rows.shape[1],
        each,
        rows.stride(0),
        y.stride(0),
        WEIGHTED=weights is not None,
        NUMBERS=of_rows is not None,
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
    return y, of_places


def sum_gradients(dy: Tensor, rows: Tensor, pairs: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if rows.shape[1] > _WIDEST:
        return plain.sum_gradients(dy, rows, pairs, places, weights)
    dy, rows = as_rows(dy), as_rows(rows)
    drows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dweights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    high, wide, warps = tile(rows.shape[1])
    launch(
        _sum_gradients,
        (cdiv(rows.shape[0], high),),
        rows,
        dy,
        rows,
        pairs.contiguous(),
        places.contiguous(),
        weights.contiguous(),
        drows,
        dweights,
        rows.shape[0],
        rows.shape[1],
        places.shape[1],
        dy.stride(0),
        rows.stride(0),
        drows.stride(0),
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
    return drows, dweights
