"""The Triton kernels of the norms: each row is read once per pass and held in registers, a few short rows to a program."""

from __future__ import annotations

import triton
import triton.language as tl

from meshfold.kernels.fp8_casts_triton import magnitude, rounded, row_scale, scale_inverse


@triton.jit
def _load_rows(base, row, stride, column, mask):
    return tl.load(base + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(base, row, stride, column, mask, value):
    tl.store(
        base + row.to(tl.int64)[:, None] * stride + column[None, :],
        value.to(base.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=["rows", "eps"])
def normalise(
    x,
    residual,
    weight,
    bias,
    y,
    summed,
    mean,
    rstd,
    values,
    inverse,
    rows,
    hidden,
    eps,
    x_stride,
    residual_stride,
    summed_stride,
    STATS_GIVEN: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST: tl.constexpr,
    CONVERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = (v - mean) * rstd * weight + bias with v = x + residual; computes mean and rstd unless they are given.

    CAST: also write y in e4m3 with the inverse of a scale for each row.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_rows = row < rows
    in_columns = column < hidden
    mask = in_rows[:, None] & in_columns[None, :]
    value = _load_rows(x, row, x_stride, column, mask)
    if HAS_RESIDUAL:
        value += _load_rows(residual, row, residual_stride, column, mask)
        # Normalise the rounded sum, which the residual stream will hold, so that fused and unfused agree.
        value = value.to(summed.dtype.element_ty)
        _store_rows(summed, row, summed_stride, column, mask, value)
        value = value.to(tl.float32)
    if CENTRED:
        if STATS_GIVEN:
            middle = tl.load(mean + row, mask=in_rows, other=0.0)
        else:
            middle = tl.sum(value, axis=1) / hidden
            tl.store(mean + row, middle, mask=in_rows)
        value = tl.where(mask, value - middle[:, None], 0.0)
    if STATS_GIVEN:
        scale = tl.load(rstd + row, mask=in_rows, other=0.0)
    else:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / hidden + eps)
        tl.store(rstd + row, scale, mask=in_rows)
    value *= scale[:, None]
    if HAS_WEIGHT:
        value *= tl.load(weight + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    _store_rows(y, row, hidden, column, mask, value)
    if CAST:
        value = value.to(y.dtype.element_ty).to(tl.float32)  # what a cast of y reads
        by = row_scale(tl.max(tl.where(mask, magnitude(value), 0.0), axis=1))
        tl.store(inverse + row, scale_inverse(by), mask=in_rows)
        place = row.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(values + place, rounded(value * by[:, None], CONVERTS), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def square_sums(x, sums, rows, hidden, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_rows = row < rows
    value = _load_rows(x, row, x_stride, column, in_rows[:, None] & (column < hidden)[None, :])
    tl.store(sums + row, tl.sum(value * value, axis=1), mask=in_rows)


@triton.jit(do_not_specialize=["rows"])
def moments(x, found, rows, hidden, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and variance of each row: ``m h -> 2 m``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_rows = row < rows
    mask = in_rows[:, None] & (column < hidden)[None, :]
    value = _load_rows(x, row, x_stride, column, mask)
    mean = tl.sum(value, axis=1) / hidden
    value = tl.where(mask, value - mean[:, None], 0.0)
    tl.store(found + row, mean, mask=in_rows)
    tl.store(found + rows + row, tl.sum(value * value, axis=1) / hidden, mask=in_rows)


@triton.jit(do_not_specialize=["rows", "parts", "eps"])
def joined_moments(found, mean, rstd, rows, parts, eps, WIDE: tl.constexpr):
    """Mean and rstd of whole rows from the moments of equal parts of them: ``g 2 m -> m, m``."""
    row = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    in_rows = row < rows
    total = tl.zeros((WIDE,), tl.float32)
    for part in range(parts):
        total += tl.load(found + 2 * part * rows + row, mask=in_rows, other=0.0)
    middle = total / parts
    spread = tl.zeros((WIDE,), tl.float32)
    for part in range(parts):
        away = tl.load(found + 2 * part * rows + row, mask=in_rows, other=0.0) - middle
        spread += tl.load(found + (2 * part + 1) * rows + row, mask=in_rows, other=0.0) + away * away
    tl.store(mean + row, middle, mask=in_rows)
    tl.store(rstd + row, 1.0 / tl.sqrt(spread / parts + eps), mask=in_rows)


@triton.jit(do_not_specialize=["rows"])
def gradient_sums(
    dy,
    x,
    weight,
    mean,
    rstd,
    sums,
    rows,
    hidden,
    dy_stride,
    x_stride,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_rows = row < rows
    in_columns = column < hidden
    mask = in_rows[:, None] & in_columns[None, :]
    normed = _load_rows(x, row, x_stride, column, mask)
    scaled = _load_rows(dy, row, dy_stride, column, mask)
    if HAS_WEIGHT:
        scaled *= tl.load(weight + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if CENTRED:
        normed -= tl.load(mean + row, mask=in_rows, other=0.0)[:, None]
        tl.store(sums + row, tl.sum(scaled, axis=1), mask=in_rows)
        sums += rows
    normed *= tl.load(rstd + row, mask=in_rows, other=0.0)[:, None]
    tl.store(sums + row, tl.sum(scaled * normed, axis=1), mask=in_rows)


@triton.jit(do_not_specialize=["rows", "width"])
def gradients(
    dy,
    x,
    weight,
    mean,
    rstd,
    sums,
    added,
    dx,
    parts,
    rows,
    hidden,
    width,
    dy_stride,
    x_stride,
    added_stride,
    SUMS_GIVEN: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute dx row by row. Each program sums dweight and dbias over its rows and stores one partial sum of each.

    ``hidden``: number of local columns; ``width``: number of columns in the statistics.
    """
    column = tl.arange(0, COLUMNS)
    in_columns = column < hidden
    weight_sum = tl.zeros((COLUMNS,), dtype=tl.float32)
    bias_sum = tl.zeros((COLUMNS,), dtype=tl.float32)
    if HAS_WEIGHT:
        gain = tl.load(weight + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        in_rows = row < rows
        mask = in_rows[:, None] & in_columns[None, :]
        normed = _load_rows(x, row, x_stride, column, mask)
        wide = _load_rows(dy, row, dy_stride, column, mask)
        scale = tl.load(rstd + row, mask=in_rows, other=0.0)[:, None]
        if CENTRED:
            normed -= tl.load(mean + row, mask=in_rows, other=0.0)[:, None]
        normed *= scale
        if HAS_WEIGHT:
            weight_sum += tl.sum(wide * normed, axis=0)
            scaled = wide * gain
        else:
            scaled = wide
        if HAS_BIAS:
            bias_sum += tl.sum(wide, axis=0)
        if SUMS_GIVEN:
            if CENTRED:
                total = tl.load(sums + row, mask=in_rows, other=0.0)
                along = tl.load(sums + rows + row, mask=in_rows, other=0.0)
            else:
                along = tl.load(sums + row, mask=in_rows, other=0.0)
        else:
            along = tl.sum(scaled * normed, axis=1)
            if CENTRED:
                total = tl.sum(scaled, axis=1)
        towards = normed * (along / width)[:, None]
        if CENTRED:
            towards += (total / width)[:, None]
        value = (scaled - towards) * scale
        if HAS_ADDED:
            value += _load_rows(added, row, added_stride, column, mask)
        _store_rows(dx, row, hidden, column, mask, value)
    part = tl.program_id(0).to(tl.int64) * hidden + column
    if HAS_WEIGHT:
        tl.store(parts + part, weight_sum, mask=in_columns)
        part += tl.num_programs(0).to(tl.int64) * hidden
    if HAS_BIAS:
        tl.store(parts + part, bias_sum, mask=in_columns)


@triton.jit(do_not_specialize=["count"])
def sum_parts(parts, found, count, hidden, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Sum the parts of each vector ``vectors count hidden -> vectors hidden``, rounded once."""
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    in_columns = column < hidden
    vector = tl.program_id(1)
    first = vector.to(tl.int64) * count
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for start in range(0, count, HIGH):
        row = start + tl.arange(0, HIGH)
        mask = (row < count)[:, None] & in_columns[None, :]
        total += _load_rows(parts, first + row, hidden, column, mask)
    tl.store(found + vector * hidden + column, tl.sum(total, axis=0).to(found.dtype.element_ty), mask=in_columns)
