"""Products of one row with a weight in Triton, which read the weight, or its codes, at the speed of memory.

A program takes a few outputs and goes along their rows of the weight; sums are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _product(
    x, w, scale, bias, y, n, k, w_row, SCALED: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < n
    column = tl.arange(0, BK)
    start = w + row.to(tl.int64)[:, None] * w_row
    acc = tl.zeros((BN, BK), tl.float32)
    for at in range(0, k, BK):
        here = at + column
        given = tl.load(x + here, mask=here < k, other=0.0).to(tl.float32)
        weight = tl.load(start + here[None, :], mask=inside[:, None] & (here < k)[None, :], other=0.0)
        acc += weight.to(tl.float32) * given[None, :]
    total = tl.sum(acc, 1)
    if SCALED:
        total *= tl.load(scale + row, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _product_int4(
    x, w, scale, bias, y, n, k, groups, GROUP: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr
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
        factor = tl.load(scale + wide * groups + (2 * here // GROUP)[None, :], mask=mask, other=0.0)
        part = ((codes & 15) - 8).to(tl.float32) * low[None, :] + ((codes >> 4) - 8).to(tl.float32) * high[None, :]
        acc += part * factor
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=inside)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """Multiply one row by a weight: ``.. k -> .. n``, in the dtype of ``x``.

    Args:
        x: of k elements in all.
        weight: ``n k``, rows contiguous; or codes: int8 or float8 ``n k``, uint8 ``n k/2`` with two of four bits each.
        bias: ``n``, or None.
        scale: of codes, float32: ``n 1``, or ``n k/group`` of four bits.
    """
    n, k = weight.shape[0], x.shape[-1]
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    rows = 4 if n >= 2048 else 1
    if weight.dtype == torch.uint8 and scale is not None:
        groups = scale.shape[1]
        wide = min(triton.next_power_of_2(k // 2), 1024)
        _product_int4[(triton.cdiv(n, rows),)](
            x,
            weight,
            scale,
            x if bias is None else bias,
            y,
            n,
            k,
            groups,
            GROUP=k // groups,
            BIAS=bias is not None,
            BN=rows,
            BP=wide,
            num_warps=4,
        )
        return y
    wide = min(triton.next_power_of_2(k), 1024 if weight.element_size() > 1 else 2048)
    _product[(triton.cdiv(n, rows),)](
        x,
        weight,
        x if scale is None else scale,
        x if bias is None else bias,
        y,
        n,
        k,
        weight.stride(0),
        SCALED=scale is not None,
        BIAS=bias is not None,
        BN=rows,
        BK=wide,
        num_warps=4,
    )
    return y
