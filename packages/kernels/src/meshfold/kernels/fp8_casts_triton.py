"""Casts to fp8 in Triton: a program takes a row, or a tile of the matrix that it turns.

Rounding is computed on integers, which gives the bits of torch's cast on every GPU and in the interpreter.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels import fp8_casts as plain
from meshfold.kernels._triton import launch

_COLUMNS = 4096  # at a time of a row
_TILE = 64
_MOST_PARTS = 64  # of the rows, each of which gives a partial amax of a column
_PART_ROWS = 128  # at least


@triton.jit
def _size(value):
    """Magnitude, infinity for nan."""
    size = tl.abs(value)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def _scale(amax):
    least = tl.maximum(amax.to(tl.float64), 1e-30)
    scale = (448.0 / least).to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(amax < float("inf"), scale.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _e4m3(value):
    """Bits of the nearest number of e4m3, saturated; nan stays nan."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    not_nan = tl.minimum(size, 0x43E00000)  # 448
    normal = ((not_nan + 0x7FFFF + ((not_nan >> 20) & 1)) >> 20) - 960
    # Below 2**-6 steps are of 2**-9, which are those of a float32 from 2**14 on.
    small = (not_nan.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    found = tl.where(size < 0x3C800000, small, normal)
    found = tl.where(size > 0x7F800000, 0x7F, found)
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _rows(x, values, inverse, columns, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    amax = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        given = tl.load(x + row * stride + start + column, mask=start + column < columns, other=0.0)
        amax = tl.maximum(amax, _size(given.to(tl.float32)))
    scale = _scale(tl.max(amax, axis=0))
    tl.store(inverse + row, 1.0 / scale)
    for start in range(0, columns, COLUMNS):
        mask = start + column < columns
        given = tl.load(x + row * stride + start + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(values + row * columns + start + column, _e4m3(given * scale), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _column_amax(x, partial, rows, columns, stride, each, TILE: tl.constexpr):
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    first = part * each
    last = tl.minimum(first + each, rows)
    amax = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(first, last, TILE):
        row = start + tl.arange(0, TILE)
        mask = (row < last)[:, None] & (column < columns)[None, :]
        given = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)
        amax = tl.maximum(amax, _size(given.to(tl.float32)))
    tl.store(partial + part * columns + column, tl.max(amax, axis=0), mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
def _columns(x, partial, values, inverse, rows, columns, stride, parts, PARTS: tl.constexpr, TILE: tl.constexpr):
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.arange(0, PARTS)
    known = (part < parts)[:, None] & (column < columns)[None, :]
    amax = tl.max(tl.load(partial + part[:, None] * columns + column[None, :], mask=known, other=0.0), axis=0)
    scale = _scale(amax)
    if tl.program_id(0) == 0:
        tl.store(inverse + column, 1.0 / scale, mask=column < columns)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    given = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    turned = tl.trans(_e4m3(given * scale[None, :]))
    place = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(values + place, turned, mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit
def _scaled(x, scale, values, columns, ALONG: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    given = tl.load(x + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    if ALONG == "rows":
        by = tl.load(scale + row)
    elif ALONG == "columns":
        by = tl.load(scale + column, mask=mask, other=1.0)
    else:
        by = tl.load(scale)
    tl.store(values + row * columns + column, _e4m3(given * by), mask=mask)


@triton.jit
def _turn(values, turned, rows, columns, stride, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    given = tl.load(values + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0)
    place = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(turned + place, tl.trans(given), mask=(column < columns)[:, None] & (row < rows)[None, :])


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.stride(1) != 1:
        return plain.cast_rows(x)
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
    inverse = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    wide = min(_COLUMNS, triton.next_power_of_2(columns))
    launch(_rows, (rows,), x, x, values, inverse, columns, x.stride(0), COLUMNS=wide, num_warps=8 if wide > 1024 else 4)
    return values.view(torch.float8_e4m3fn), inverse


def cast_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.stride(1) != 1:
        return plain.cast_columns(x)
    rows, columns = x.shape
    values = torch.empty(columns, rows, dtype=torch.uint8, device=x.device)
    inverse = torch.empty(columns, 1, dtype=torch.float32, device=x.device)
    parts = max(1, min(_MOST_PARTS, rows // _PART_ROWS))
    each = triton.cdiv(rows, parts)
    partial = torch.empty(parts, columns, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(columns, _TILE)
    launch(_column_amax, (tiles, parts), x, x, partial, rows, columns, x.stride(0), each, TILE=_TILE, num_warps=4)
    launch(
        _columns,
        (triton.cdiv(rows, _TILE), tiles),
        x,
        x,
        partial,
        values,
        inverse,
        rows,
        columns,
        x.stride(0),
        parts,
        PARTS=triton.next_power_of_2(parts),
        TILE=_TILE,
        num_warps=4,
    )
    return values.view(torch.float8_e4m3fn), inverse


def cast_scaled(x: Tensor, scale: Tensor, out: Tensor, along: Literal["rows", "columns", "none"]) -> None:
    rows, columns = x.shape
    wide = min(_COLUMNS, triton.next_power_of_2(columns))
    grid = (rows, triton.cdiv(columns, wide))
    launch(_scaled, grid, x, x, scale, out.view(torch.uint8), columns, ALONG=along, COLUMNS=wide, num_warps=4)


def turn(values: Tensor, inverse: Tensor) -> Tensor:
    if values.stride(1) != 1:
        return plain.turn(values, inverse)
    rows, columns = values.shape
    turned = torch.empty(columns, rows, dtype=torch.uint8, device=values.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    launch(
        _turn, grid, values, values.view(torch.uint8), turned, rows, columns, values.stride(0), TILE=_TILE, num_warps=4
    )
    return turned.view(values.dtype)
