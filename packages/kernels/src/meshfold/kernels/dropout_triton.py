"""Dropout by global element in Triton: the mask lives in registers only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import bits_at, cdiv, launch, tile
from meshfold.kernels.inputs import contiguous_like


@triton.jit(do_not_specialize=["state", "row_numbers", "count", "threshold", "scale", "col_offset", "global_cols"])
def _dropout(
    x,
    y,
    state,
    row_numbers,
    count,
    columns,
    stride,
    threshold,
    scale,
    col_offset,
    global_cols,
    STATE_IN_MEMORY: tl.constexpr,
    ROWS_IN_MEMORY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (row < count)[:, None] & (column < columns)
    if STATE_IN_MEMORY:
        start = tl.load(state)
    else:
        start = state
    if ROWS_IN_MEMORY:
        number = tl.load(row_numbers + row, mask=row < count, other=0)
    else:
        number = row.to(tl.int64) + row_numbers
    index = number[:, None] * global_cols + col_offset + column
    bits = bits_at(start, index)
    keep = (bits >> 40).to(tl.int32) >= threshold
    place = row.to(tl.int64)[:, None]
    value = tl.load(x + place * stride + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.where(keep, value * scale, 0.0)
    tl.store(y + place * columns + column, value.to(y.dtype.element_ty), mask=mask)


def drop(
    x: Tensor,
    threshold: int,
    scale: float,
    state: int | Tensor,
    rows: int | Tensor,
    col_offset: int,
    global_cols: int,
) -> Tensor:
    count, columns = x.shape
    y = contiguous_like(x)
    high, wide, warps = tile(columns, elements=1024, widest=1024)
    launch(
        _dropout,
        (cdiv(count, high), cdiv(columns, wide)),
        x,
        x,
        y,
        state.to(x.device) if isinstance(state, Tensor) else state,
        rows.to(x.device).contiguous() if isinstance(rows, Tensor) else rows,
        count,
        columns,
        x.stride(0),
        threshold,
        scale,
        col_offset,
        global_cols,
        STATE_IN_MEMORY=isinstance(state, Tensor),
        ROWS_IN_MEMORY=isinstance(rows, Tensor),
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
    return y
