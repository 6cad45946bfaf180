"""Products of one row with a weight in Triton, which read the weight, or its codes, at the speed of memory.

A program takes a few outputs and goes along their rows of the weight; sums are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import launch


@triton.jit
def _product(
    x,
    w,
    scale,
    zero,
    bias,
    y,
    n,
    k,
    w_row,
    groups,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Multiply by a weight (GROUP 0), by codes with a scale of each row (GROUP 1), or of each group."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < n
    column = tl.arange(0, BK)
    wide = row.to(tl.int64)[:, None]
    start = w + wide * w_row
    acc = tl.zeros((BN, BK), tl.float32)
    for at in range(0, k, BK):
        here = at + column
        given = tl.load(x + here, mask=here < k, other=0.0).to(tl.float32)
        mask = inside[:, None] & (here < k)[None, :]
        weight = tl.load(start + here[None, :], mask=mask, other=0.0).to(tl.float32)
        if GROUP > 1:
            group = wide * groups + (here // GROUP)[None, :]
            if ZERO:
                weight -= tl.load(zero + group, mask=mask, other=0).to(tl.float32)
            weight *= tl.load(scale + group, mask=mask, other=0.0)
        elif ZERO:
            weight -= tl.load(zero + row, mask=inside, other=0).to(tl.float32)[:, None]
        acc += weight * given[None, :]
    total = tl.sum(acc, 1)
    if GROUP == 1:
        total *= tl.load(scale + row, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _product_int4(
    x,
    w,
    scale,
    zero,
    bias,
    y,
    n,
    k,
    groups,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
):
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < n
    pair = tl.arange(0, BP)
    wide = row.to(tl.int64)[:, None]
    acc = tl.zeros((BN, BP), tl.float32)
    for at in range(0, k // 2, BP):
        here = at + pair
        there = here < k // 2
        low = tl.load(x + 2 * here, mask=there, other=0.0).to(tl.float32)
        high = tl.load(x + 2 * here + 1, mask=there, other=0.0).to(tl.float32)
        mask = inside[:, None] & there[None, :]
        codes = tl.load(w + wide * (k // 2) + here[None, :], mask=mask, other=0).to(tl.int32)
        group = wide * groups + (2 * here // GROUP)[None, :]
        middle = tl.full((BN, BP), 8.0, tl.float32)
        if ZERO:
            middle = tl.load(zero + group, mask=mask, other=0).to(tl.float32)
        part = ((codes & 15).to(tl.float32) - middle) * low[None, :]
        part += ((codes >> 4).to(tl.float32) - middle) * high[None, :]
        acc += part * tl.load(scale + group, mask=mask, other=0.0)
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=inside)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """Multiply one row by a weight or its codes: :func:`meshfold.kernels.row_product.row_product`."""
    n, k = weight.shape[0], x.shape[-1]
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    rows = 4 if n >= 2048 else 1
    grid = (triton.cdiv(n, rows),)
    groups = 1 if scale is None else scale.shape[1]
    given = [weight if part is None else part for part in (scale, zero, bias)]  # what is not there is not read
    flags = dict(ZERO=zero is not None, BIAS=bias is not None, BN=rows, num_warps=4)
    if weight.dtype == torch.uint8:
        wide = min(triton.next_power_of_2(k // 2), 1024)
        launch(_product_int4, grid, x, x, weight, *given, y, n, k, groups, GROUP=k // groups, BP=wide, **flags)
        return y
    group = 0 if scale is None else 1 if groups == 1 else k // groups
    wide = min(triton.next_power_of_2(k), 1024 if weight.element_size() > 1 else 2048)
    launch(_product, grid, x, x, weight, *given, y, n, k, weight.stride(0), groups, GROUP=group, BK=wide, **flags)
    return y
