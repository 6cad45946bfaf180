"""Activations in Triton: one read of every input, one write of every output."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels import activations as plain
from meshfold.kernels._triton import Prepared, cdiv, launch, remember, tile
from meshfold.kernels.activations import Activation
from meshfold.kernels.fp8_casts_triton import cast_rows, converts, magnitude, rounded, row_scale, scale_inverse
from meshfold.kernels.inputs import contiguous_like

_WIDEST_BLOCK = 1024
_WIDEST_ROW = 16384  # elements that the registers of a program hold
_KINDS = {"silu": 0, "gelu": 1, "gelu tanh": 2}


@triton.jit
def _block(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's rows (int64) and columns of a 2-D grid, and a mask of those that exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit(do_not_specialize=["rows"])
def _gated(
    gate,
    up,
    y,
    rows,
    columns,
    gate_stride,
    up_stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, mask = _block(rows, columns, ROWS, COLUMNS)
    g = tl.load(gate + row * gate_stride + column, mask=mask).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask).to(tl.float32)
    value = _activation(g, KIND) * u
    tl.store(y + row * columns + column, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gated_cast(
    gate,
    up,
    y,
    values,
    inverse,
    columns,
    gate_stride,
    up_stride,
    KIND: tl.constexpr,
    CONVERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a row, which stays in registers, and write it twice: unchanged, and in e4m3 with the inverse of its scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    mask = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = (_activation(g, KIND) * u).to(y.dtype.element_ty)
    tl.store(y + row * columns + column, value, mask=mask)
    value = value.to(tl.float32)
    scale = row_scale(tl.max(magnitude(value), axis=0))
    tl.store(inverse + row, scale_inverse(scale))
    tl.store(values + row * columns + column, rounded(value * scale, CONVERTS), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gated_gradients(
    dy,
    gate,
    up,
    dgate,
    dup,
    rows,
    columns,
    dy_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, mask = _block(rows, columns, ROWS, COLUMNS)
    d = tl.load(dy + row * dy_stride + column, mask=mask).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=mask).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask).to(tl.float32)
    to_gate = d * u * _slope(g, KIND)
    to_up = d * _activation(g, KIND)
    tl.store(dgate + row * dgate_stride + column, to_gate.to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + row * dup_stride + column, to_up.to(dup.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _weighted(
    gate,
    up,
    weights,
    filled,
    y,
    rows,
    columns,
    gate_stride,
    up_stride,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if BOUNDED:
        rows = tl.minimum(rows, tl.load(filled))
    row, column, mask = _block(rows, columns, ROWS, COLUMNS)
    g = tl.load(gate + row * gate_stride + column, mask=mask).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask).to(tl.float32)
    weight = tl.load(weights + row, mask=row < rows).to(tl.float32)
    value = _activation(g, 0) * u * weight
    tl.store(y + row * columns + column, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _weighted_gradients(
    dy,
    gate,
    up,
    weights,
    filled,
    dgate,
    dup,
    dweights,
    rows,
    columns,
    dy_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if BOUNDED:
        rows = tl.minimum(rows, tl.load(filled))
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        mask = (row < rows) & (column < columns)
        d = tl.load(dy + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
        activated = _activation(g, 0)
        total += d * activated * u
        d = d * weight
        to_gate, to_up = d * u * _slope(g, 0), d * activated
        tl.store(dgate + row * dgate_stride + column, to_gate.to(dgate.dtype.element_ty), mask=mask)
        tl.store(dup + row * dup_stride + column, to_up.to(dup.dtype.element_ty), mask=mask)
    tl.store(dweights + row, tl.sum(total, 1)[:, None], mask=row < rows)


@triton.jit
def _gelu_value(v, TANH: tl.constexpr):
    if TANH:
        # 0.5 (1 + tanh(z)) = sigmoid(2 z), without cancellation for large negative z.
        return v * tl.sigmoid(1.5957691216057308 * v * (1.0 + 0.044715 * v * v))
    return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))


@triton.jit
def _gelu_slope(v, TANH: tl.constexpr):
    if TANH:
        share = tl.sigmoid(1.5957691216057308 * v * (1.0 + 0.044715 * v * v))
        return share + v * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * v * v)
    return 0.5 * (1.0 + tl.erf(v * 0.7071067811865476)) + v * tl.exp(-0.5 * v * v) * 0.3989422804014327


@triton.jit
def _activation(v, KIND: tl.constexpr):
    """silu (KIND 0), gelu (1) or its tanh approximation (2)."""
    if KIND == 0:
        return v * tl.sigmoid(v)
    return _gelu_value(v, KIND == 2)


@triton.jit
def _slope(v, KIND: tl.constexpr):
    if KIND == 0:
        share = tl.sigmoid(v)
        return share + v * share * (1.0 - share)
    return _gelu_slope(v, KIND == 2)


def gated(gate: Tensor, up: Tensor, kind: Activation = "silu") -> Tensor:
    if up.dtype is torch.float64:
        return plain.gated(gate, up, kind)
    y = contiguous_like(gate)
    _prepared(_gated, kind, gate, up).run(gate, up, y)
    return y


_known: dict[object, Prepared] = {}


def _prepared(kernel: Any, kind: Activation, *strided: Tensor) -> Prepared:
    """Return the launch of a kernel of gates on tensors like these, whose strides it takes after rows and columns."""
    gate = strided[-1]  # of any, the shape is the same
    strides = tuple([x.stride(0) for x in strided])
    key = (id(kernel), kind, gate.shape, strides, *[x.dtype for x in strided], gate.get_device())
    found = _known.get(key)
    if found is None:
        rows, columns = gate.shape
        high, wide, warps = tile(columns, widest=_WIDEST_BLOCK)
        grid, settings = (cdiv(rows, high), cdiv(columns, wide)), dict(ROWS=high, COLUMNS=wide, num_warps=warps)
        found = Prepared(kernel, grid, (rows, columns, *strides), KIND=_KINDS[kind], **settings)
        remember(_known, key, found)
    return found


def gated_and_cast(gate: Tensor, up: Tensor, kind: Activation = "silu") -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = gate.shape
    if columns > _WIDEST_ROW:
        y = gated(gate, up, kind)
        return y, *cast_rows(y)
    y = contiguous_like(gate)
    values = torch.empty(gate.shape, dtype=torch.uint8, device=gate.device)
    inverse = torch.empty(rows, 1, dtype=torch.float32, device=gate.device)
    wide = triton.next_power_of_2(columns)
    settings = dict(KIND=_KINDS[kind], CONVERTS=converts(gate), COLUMNS=wide, num_warps=16 if wide > 4096 else 4)
    strides = gate.stride(0), up.stride(0)
    launch(_gated_cast, (rows,), gate, gate, up, y, values, inverse, columns, *strides, **settings)
    return y, values.view(torch.float8_e4m3fn), inverse


def gated_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, kind: Activation = "silu"
) -> None:
    if up.dtype is torch.float64:
        return plain.gated_gradients(dy, gate, up, dgate, dup, kind)
    _prepared(_gated_gradients, kind, dy, gate, up, dgate, dup).run(dy, gate, up, dgate, dup)


def weighted_gated(gate: Tensor, up: Tensor, weights: Tensor, filled: Tensor | None = None) -> Tensor:
    rows, columns = gate.shape
    y = contiguous_like(gate)
    high, wide, warps = tile(columns, widest=_WIDEST_BLOCK)
    launch(
        _weighted,
        (cdiv(rows, high), cdiv(columns, wide)),
        gate,
        gate,
        up,
        weights.contiguous(),
        gate if filled is None else filled,
        y,
        rows,
        columns,
        gate.stride(0),
        up.stride(0),
        BOUNDED=filled is not None,
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
    return y


def weighted_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, weights: Tensor, dgate: Tensor, dup: Tensor, filled: Tensor | None = None
) -> Tensor:
    rows, columns = gate.shape
    dweights = torch.empty(rows, dtype=torch.float32, device=gate.device)
    high, wide, warps = tile(columns, widest=_WIDEST_BLOCK)
    launch(
        _weighted_gradients,
        (cdiv(rows, high),),
        gate,
        dy,
        gate,
        up,
        weights.contiguous(),
        gate if filled is None else filled,
        dgate,
        dup,
        dweights,
        rows,
        columns,
        dy.stride(0),
        gate.stride(0),
        up.stride(0),
        dgate.stride(0),
        dup.stride(0),
        BOUNDED=filled is not None,
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
    return dweights
