"""Casts to fp8 in Triton: a program takes a row, or a tile of the matrix that it turns.

If the amax runs across memory, a first kernel takes it of all columns, and of all rows if both are needed. A second one casts.

GPUs of compute capability 8.9 and later round two numbers in one instruction. Elsewhere rounding is computed on integers, which
gives the same bits on every GPU and in the interpreter.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels import fp8_casts as plain
from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.fp8_casts import Cast

_COLUMNS = 4096  # at a time of a row
_TILE = 64
_TALL = 128  # rows of a tile that is turned: so many bytes of a column are written together
_AMAX_TILE = (16, 256)  # rows and columns
_MOST_PARTS = 64  # of the rows, each of which gives a partial amax of a column
_PART_ROWS = 128  # at least
_CONVERTS = (8, 9)  # compute capability from which on a GPU rounds to e4m3 itself


@triton.jit
def magnitude(value):
    """Magnitude, infinity for nan."""
    size = tl.abs(value)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def row_scale(amax):
    """Power of 2 below 448 / amax, from the bits of both: 448 is 1.75 * 2**8. nan for infinity."""
    bits = tl.maximum(amax, 1e-30).to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale = ((262 - above) << 23) - (bits & 0x7F800000)
    return tl.where(amax < float("inf"), scale.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def scale_inverse(scale):
    """Reciprocal of a power of 2, from its bits; nan for nan."""
    inverse = (254 << 23) - scale.to(tl.int32, bitcast=True)
    return tl.where(scale == scale, inverse.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _e4m3(value):
    """Bits of the nearest number of e4m3, saturated; nan stays nan."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    not_nan = tl.minimum(size, 0x43E00000)  # 448
    normal = ((not_nan + 0x7FFFF + ((not_nan >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the step is 2**-9, the step of a float32 from 2**14 on.
    small = (not_nan.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    found = tl.where(size < 0x3C800000, small, normal)
    found = tl.where(size > 0x7F800000, 0x7F, found)
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def rounded(value, CONVERTS: tl.constexpr):
    """:func:`_e4m3`, by the GPU's own instruction where it has one."""
    if CONVERTS:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _e4m3(value)


@triton.jit
def _rows(x, values, inverse, columns, stride, COLUMNS: tl.constexpr, CONVERTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    amax = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        given = tl.load(x + row * stride + start + column, mask=start + column < columns, other=0.0)
        amax = tl.maximum(amax, magnitude(given.to(tl.float32)))
    scale = row_scale(tl.max(amax, axis=0))
    tl.store(inverse + row, scale_inverse(scale))
    for start in range(0, columns, COLUMNS):
        mask = start + column < columns
        given = tl.load(x + row * stride + start + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(values + row * columns + start + column, rounded(given * scale, CONVERTS), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _amax(x, amax, rows, columns, stride, each, BOTH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Raise the amax of columns, and after them of rows, to a part's amax; as bits, which have the order of their numbers."""
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    first = tl.program_id(1) * each
    last = tl.minimum(first + each, rows)
    found = tl.zeros((HIGH, WIDE), dtype=tl.float32)  # its rows are brought together once, at the end
    for start in range(first, last, HIGH):
        row = start + tl.arange(0, HIGH)
        mask = (row < last)[:, None] & (column < columns)[None, :]
        given = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)
        size = magnitude(given.to(tl.float32))
        found = tl.maximum(found, size)
        if BOTH:
            tl.atomic_max(amax + columns + row, tl.max(size, axis=1).to(tl.int32, bitcast=True), mask=row < last)
    tl.atomic_max(amax + column, tl.max(found, axis=0).to(tl.int32, bitcast=True), mask=column < columns)


@triton.jit
def _cast_tile(
    x,
    amax,
    values,
    inverse,
    row,
    column,
    scale,
    rows,
    columns,
    stride,
    BOTH: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """Return some rows of a tile in e4m3 by the scales of columns, as int32; BOTH: write them by the scales of rows."""
    in_rows, in_columns = row < rows, column < columns
    mask = in_rows[:, None] & in_columns[None, :]
    given = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if BOTH:
        by = row_scale(tl.load(amax + columns + row, mask=in_rows, other=0).to(tl.float32, bitcast=True))
        if tl.program_id(1) == 0:
            tl.store(inverse + row, scale_inverse(by), mask=in_rows)
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(values + place, rounded(given * by[:, None], CONVERTS), mask=mask)
    return rounded(given * scale[None, :], CONVERTS).to(tl.int32)


@triton.jit(do_not_specialize=["rows"])
def _columns(
    x,
    amax,
    values,
    inverse,
    turned,
    turned_inverse,
    rows,
    columns,
    stride,
    BOTH: tl.constexpr,
    FOURS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """Cast a tile and turn it. FOURS: rows come in fours; those of a column are turned as one number of 32 bits, ``turned``'s."""
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    in_columns = column < columns
    scale = row_scale(tl.load(amax + column, mask=in_columns, other=0).to(tl.float32, bitcast=True))
    if tl.program_id(0) == 0:
        tl.store(turned_inverse + column, scale_inverse(scale), mask=in_columns)
    if FOURS:
        four = tl.program_id(0) * (HIGH // 4) + tl.arange(0, HIGH // 4)
        word = _cast_tile(
            x, amax, values, inverse, four * 4, column, scale, rows, columns, stride, BOTH=BOTH, CONVERTS=CONVERTS
        )
        for part in tl.static_range(1, 4):
            byte = _cast_tile(
                x,
                amax,
                values,
                inverse,
                four * 4 + part,
                column,
                scale,
                rows,
                columns,
                stride,
                BOTH=BOTH,
                CONVERTS=CONVERTS,
            )
            word = word | (byte << (8 * part))
        place = column.to(tl.int64)[:, None] * (rows // 4) + four[None, :]
        tl.store(turned + place, tl.trans(word), mask=in_columns[:, None] & (four * 4 < rows)[None, :])
    else:
        row = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
        byte = _cast_tile(
            x, amax, values, inverse, row, column, scale, rows, columns, stride, BOTH=BOTH, CONVERTS=CONVERTS
        )
        place = column.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(turned + place, tl.trans(byte.to(tl.uint8)), mask=in_columns[:, None] & (row < rows)[None, :])


@triton.jit
def _scaled(x, scale, values, columns, ALONG: tl.constexpr, COLUMNS: tl.constexpr, CONVERTS: tl.constexpr):
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
    tl.store(values + row * columns + column, rounded(given * by, CONVERTS), mask=mask)


@triton.jit
def _turn(values, turned, rows, columns, stride, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    given = tl.load(values + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0)
    place = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(turned + place, tl.trans(given), mask=(column < columns)[:, None] & (row < rows)[None, :])


@functools.cache
def _of_device(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= _CONVERTS


def converts(x: Tensor) -> bool:
    """Return True if the GPU of a tensor rounds to e4m3 in one instruction."""
    return x.is_cuda and _of_device(x.device.index)


def cast_rows(x: Tensor) -> Cast:
    if x.stride(1) != 1:
        return plain.cast_rows(x)
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
    inverse = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    wide = min(_COLUMNS, triton.next_power_of_2(columns))
    warps = 8 if wide > 1024 else 4
    settings = dict(COLUMNS=wide, CONVERTS=converts(x), num_warps=warps)
    launch(_rows, (rows,), x, x, values, inverse, columns, x.stride(0), **settings)
    return values.view(torch.float8_e4m3fn), inverse


def cast_columns(x: Tensor) -> Cast:
    if x.stride(1) != 1:
        return plain.cast_columns(x)
    return cast_turned(x, largest_magnitudes(x, False), False)[1]


def cast_both(x: Tensor) -> tuple[Cast, Cast]:
    if x.stride(1) != 1:
        return plain.cast_both(x)
    return cast_turned(x, largest_magnitudes(x, True), True)


def largest_magnitudes(x: Tensor, both: bool) -> Tensor:
    if x.stride(1) != 1:
        return plain.largest_magnitudes(x, both)
    rows, columns = x.shape
    amax = torch.zeros(columns + rows if both else columns, dtype=torch.int32, device=x.device)
    parts = max(1, min(_MOST_PARTS, rows // _PART_ROWS))
    high, wide = _AMAX_TILE
    grid = (cdiv(columns, wide), parts)
    sizes = (rows, columns, x.stride(0))
    launch(_amax, grid, x, x, amax, *sizes, cdiv(rows, parts), BOTH=both, HIGH=high, WIDE=wide, num_warps=4)
    return amax.view(torch.float32)


def cast_turned(x: Tensor, amax: Tensor, both: bool) -> tuple[Cast, Cast]:
    if x.stride(1) != 1:
        return plain.cast_turned(x, amax, both)
    rows, columns = x.shape
    kept = rows if both else 0
    values = torch.empty(kept, columns, dtype=torch.uint8, device=x.device)
    inverse = torch.empty(kept, 1, dtype=torch.float32, device=x.device)
    turned = torch.empty(columns, rows, dtype=torch.uint8, device=x.device)
    turned_inverse = torch.empty(columns, 1, dtype=torch.float32, device=x.device)
    grid = (cdiv(rows, _TALL), cdiv(columns, _TILE))
    fours = rows % 4 == 0
    settings = dict(BOTH=both, FOURS=fours, HIGH=_TALL, WIDE=_TILE, CONVERTS=converts(x), num_warps=8)
    to = turned.view(torch.int32) if fours else turned
    bits = amax.contiguous().view(torch.int32)
    launch(_columns, grid, x, x, bits, values, inverse, to, turned_inverse, rows, columns, x.stride(0), **settings)
    return (values.view(torch.float8_e4m3fn), inverse), (turned.view(torch.float8_e4m3fn), turned_inverse)


def cast_scaled(x: Tensor, scale: Tensor, out: Tensor, along: Literal["rows", "columns", "none"]) -> None:
    rows, columns = x.shape
    wide = min(_COLUMNS, triton.next_power_of_2(columns))
    grid = (rows, cdiv(columns, wide))
    settings = dict(ALONG=along, COLUMNS=wide, CONVERTS=converts(x), num_warps=4)
    launch(_scaled, grid, x, x, scale, out.view(torch.uint8), columns, **settings)


def turn(values: Tensor, inverse: Tensor) -> Tensor:
    if values.stride(1) != 1:
        return plain.turn(values, inverse)
    rows, columns = values.shape
    turned = torch.empty(columns, rows, dtype=torch.uint8, device=values.device)
    grid = (cdiv(rows, _TILE), cdiv(columns, _TILE))
    launch(
        _turn, grid, values, values.view(torch.uint8), turned, rows, columns, values.stride(0), TILE=_TILE, num_warps=4
    )
    return turned.view(values.dtype)
