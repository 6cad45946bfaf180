"""Adam in Triton: one launch over a flat shard. bfloat16 goes in and out as int16, rounded in integer bits."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels import float_bits as plain
from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.adam.update import MOMENTS, PARAMETERS, Scalars, Step
from meshfold.kernels.float_bits_triton import (
    bits,
    decode,
    encode,
    from_bfloat16,
    from_bits,
    join,
    noise_at,
    raw,
    scale_of,
    split,
    stochastic,
    to_bfloat16,
)

if TYPE_CHECKING:
    from meshfold.kernels.adam.state import AdamState, QuantizedState, SplitState, WholeState

_TILE = 1024
# Not specialised. The number of elements is not in this list: if 16 divides it, masked loads and stores are vectorised
# (4.1 TB/s on an H200, 3.4 without).
_RUNTIME = ["start", "noise", "grad_scale"]


@triton.jit
def _gradient(grad, place, mask, grad_scale, BF16: tl.constexpr, SCALE_IN_MEMORY: tl.constexpr):
    g = tl.load(grad + place, mask=mask, other=0)
    wide = from_bfloat16(g) if BF16 else g.to(tl.float32)
    if SCALE_IN_MEMORY:
        return wide * tl.load(grad_scale)
    else:
        return wide * grad_scale


@triton.jit
def _moved(p, m, v, keep, step_size, correction, eps):
    return p * keep - tl.div_rn(m, tl.sqrt_rn(v) * correction + eps) * step_size


@triton.jit(do_not_specialize=_RUNTIME)
def _elementwise(
    master,
    lo,
    copy,
    exp_avg,
    exp_avg_sq,
    grad,
    grad_scale,
    n,
    noise,
    start,
    beta1,
    rest1,
    beta2,
    rest2,
    keep,
    step_size,
    correction,
    eps,
    l2,
    SPLIT: tl.constexpr,
    COPY: tl.constexpr,
    BF16_GRAD: tl.constexpr,
    BF16_MOMENTS: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr,
    L2: tl.constexpr,
    PARAMETERS: tl.constexpr,
    MOMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE
    place = first + tl.arange(0, TILE)
    mask = place < n
    g = _gradient(grad, place, mask, grad_scale, BF16_GRAD, SCALE_IN_MEMORY)
    if PARAMETERS or L2:
        p = tl.load(master + place, mask=mask, other=0)
        if SPLIT:
            p = join(p, tl.load(lo + place, mask=mask, other=0))
    if L2:
        g = g + l2 * p
    m, v = tl.load(exp_avg + place, mask=mask, other=0), tl.load(exp_avg_sq + place, mask=mask, other=0)
    if BF16_MOMENTS:
        m, v = from_bfloat16(m), from_bfloat16(v)
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * g) * rest2
    if PARAMETERS:
        p = _moved(p, m, v, keep, step_size, correction, eps)
        if SPLIT:
            upper, lower = split(p)
            tl.store(master + place, upper, mask=mask)
            tl.store(lo + place, lower, mask=mask)
        else:
            tl.store(master + place, p, mask=mask)
        if COPY == 1:
            tl.store(copy + place, to_bfloat16(p), mask=mask)
        if COPY == 2:
            tl.store(copy + place, p.to(tl.float16), mask=mask)
    if MOMENTS:
        if BF16_MOMENTS:
            random = noise_at(noise, start + first, start + place)
            tl.store(exp_avg + place, stochastic(m, random >> 16), mask=mask)
            tl.store(exp_avg_sq + place, stochastic(v, random & 0xFFFF), mask=mask)
        else:
            tl.store(exp_avg + place, m, mask=mask)
            tl.store(exp_avg_sq + place, v, mask=mask)


@triton.jit
def _largest(x):
    """Largest magnitude of each row, or NaN. Bit patterns sort as the magnitudes do, NaN last."""
    top = tl.max((bits(x) & 0x7FFFFFFF).to(tl.int32, bitcast=True), axis=1)
    return top.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_RUNTIME)
def _quantized(
    hi,
    lo,
    exp_avg,
    exp_avg_scale,
    exp_avg_sq,
    exp_avg_sq_scale,
    grad,
    grad_scale,
    n,
    noise,
    start,
    beta1,
    rest1,
    beta2,
    rest2,
    keep,
    step_size,
    correction,
    eps,
    l2,
    BF16_GRAD: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr,
    L2: tl.constexpr,
    PARAMETERS: tl.constexpr,
    MOMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    SHARED: tl.constexpr,
    M_SHIFT: tl.constexpr,
    M_UNIT: tl.constexpr,
    V_SHIFT: tl.constexpr,
    V_UNIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    full = row * SHARED < n
    place = row[:, None] * SHARED + tl.arange(0, SHARED)[None, :]
    mask = place < n
    g = _gradient(grad, place, mask, grad_scale, BF16_GRAD, SCALE_IN_MEMORY)
    if PARAMETERS or L2:
        p = join(tl.load(hi + place, mask=mask, other=0), tl.load(lo + place, mask=mask, other=0))
    if L2:
        g = g + l2 * p
    code = tl.load(exp_avg + place, mask=mask, other=0).to(tl.uint32)
    m = decode(code & 127, tl.load(exp_avg_scale + row, mask=full, other=0.0)[:, None], M_SHIFT)
    m = from_bits(bits(m) | ((code >> 7) << 31))
    code = tl.load(exp_avg_sq + place, mask=mask, other=0).to(tl.uint32)
    v = decode(code, tl.load(exp_avg_sq_scale + row, mask=full, other=0.0)[:, None], V_SHIFT)
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * g) * rest2
    if PARAMETERS:
        upper, lower = split(_moved(p, m, v, keep, step_size, correction, eps))
        tl.store(hi + place, upper, mask=mask)
        tl.store(lo + place, lower, mask=mask)
    if MOMENTS:
        # Past the end, old moments and gradient were loaded as zeros, so no scale depends on them.
        random = noise_at(noise, start + tl.program_id(0).to(tl.int64) * ROWS * SHARED, start + place)
        scale, inverse = scale_of(_largest(m), M_UNIT, SMALLEST)
        u = bits(m)
        q = encode(from_bits(u & 0x7FFFFFFF), inverse[:, None], random >> 16, M_SHIFT, 127)
        tl.store(exp_avg + place, (q | ((u >> 31) << 7)).to(tl.uint8), mask=mask)
        tl.store(exp_avg_scale + row, scale, mask=full)
        scale, inverse = scale_of(_largest(v), V_UNIT, SMALLEST)
        q = encode(v, inverse[:, None], random & 0xFFFF, V_SHIFT, 255)
        q = tl.maximum(q, (v > 0.0).to(tl.uint32))
        tl.store(exp_avg_sq + place, q.to(tl.uint8), mask=mask)
        tl.store(exp_avg_sq_scale + row, scale, mask=full)


def _scalars(s: Scalars) -> tuple[float, ...]:
    return s.beta1, s.rest1, s.beta2, s.rest2, s.keep, s.step_size, s.correction, s.eps, s.l2


def _flags(grad: Tensor, step: Step) -> dict[str, Any]:
    return {
        "BF16_GRAD": grad.dtype is torch.bfloat16,
        "SCALE_IN_MEMORY": isinstance(step.grad_scale, Tensor),
        "L2": step.scalars.l2 != 0.0,
        "PARAMETERS": bool(step.writes & PARAMETERS),
        "MOMENTS": bool(step.writes & MOMENTS),
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


def _take(state: AdamState, before: AdamState | None) -> None:
    """Copy ``before`` into ``state``, which is then stepped in place."""
    for field in fields(state) if before is not None else ():
        new, old = getattr(state, field.name), getattr(before, field.name)
        if new is not None:
            new.copy_(old)


def step_whole(state: WholeState, grad: Tensor, step: Step, before: WholeState | None) -> None:
    _take(state, before)
    p = state.parameter.detach()
    copy = p if state.copy is None else state.copy
    launch(
        _elementwise,
        (cdiv(p.numel(), _TILE),),
        p,
        p,
        p,
        raw(copy),
        state.exp_avg,
        state.exp_avg_sq,
        raw(grad),
        step.grad_scale,
        p.numel(),
        0,
        0,
        *_scalars(step.scalars),
        SPLIT=False,
        COPY={torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[copy.dtype],
        BF16_MOMENTS=False,
        TILE=_TILE,
        **_flags(grad, step),
    )


def step_split(state: SplitState, grad: Tensor, step: Step, before: SplitState | None) -> None:
    _take(state, before)
    hi, n = raw(state.hi), grad.numel()
    launch(
        _elementwise,
        (cdiv(n, _TILE),),
        hi,
        hi,
        state.lo,
        hi,
        raw(state.exp_avg),
        raw(state.exp_avg_sq),
        raw(grad),
        step.grad_scale,
        n,
        step.noise,
        step.start,
        *_scalars(step.scalars),
        SPLIT=True,
        COPY=0,
        BF16_MOMENTS=state.exp_avg.dtype is torch.bfloat16,
        TILE=_TILE,
        **_flags(grad, step),
    )


def step_quantized(state: QuantizedState, grad: Tensor, step: Step, before: QuantizedState | None) -> None:
    _take(state, before)
    s, n, rows = state, grad.numel(), _TILE // plain.QUANTIZED_BLOCK
    launch(
        _quantized,
        (cdiv(n, _TILE),),
        s.hi,
        raw(s.hi),
        s.lo,
        s.exp_avg,
        s.exp_avg_scale,
        s.exp_avg_sq,
        s.exp_avg_sq_scale,
        raw(grad),
        step.grad_scale,
        n,
        step.noise,
        step.start,
        *_scalars(step.scalars),
        ROWS=rows,
        SHARED=plain.QUANTIZED_BLOCK,
        M_SHIFT=plain.SIGNED_CODE.shift,
        M_UNIT=plain.SIGNED_CODE.unit,
        V_SHIFT=plain.UNSIGNED_CODE.shift,
        V_UNIT=plain.UNSIGNED_CODE.unit,
        SMALLEST=plain.SMALLEST_SCALED,
        **_flags(grad, step),
    )
