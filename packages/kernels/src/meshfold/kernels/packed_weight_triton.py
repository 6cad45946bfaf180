"""Packed weights in Triton: codes become the weight in one pass over memory, with the bits of the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import launch


@triton.jit
def _unpack(
    codes,
    scale,
    zero,
    out,
    k,
    groups,
    GROUP: tl.constexpr,
    FOUR: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < k
    if FOUR:  # the first of a pair is in the lower half
        pair = tl.load(codes + row * (k // 2) + column // 2, mask=inside, other=0).to(tl.int32)
        level = ((pair >> (4 * (column % 2))) & 15).to(tl.float32)
    else:
        level = tl.load(codes + row * k + column, mask=inside, other=0.0).to(tl.float32)
    group = row * groups + column // GROUP
    if ZERO:
        level -= tl.load(zero + group, mask=inside, other=0).to(tl.float32)
    elif FOUR:
        level -= 8.0
    value = level * tl.load(scale + group, mask=inside, other=0.0)
    tl.store(out + row * k + column, value.to(out.dtype.element_ty), mask=inside)


def launch_unpack(codes: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight ``n k`` of codes; arguments as of :class:`meshfold.kernels.packed_weight.PackedWeight`."""
    four = codes.dtype == torch.uint8
    n, k = codes.shape[0], codes.shape[1] * (2 if four else 1)
    groups = scale.shape[1]
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    block = min(triton.next_power_of_2(k), 2048)
    launch(
        _unpack,
        (n, triton.cdiv(k, block)),
        codes,
        codes.contiguous(),
        scale.contiguous(),
        scale if zero is None else zero.contiguous(),  # what is not there is not read
        out,
        k,
        groups,
        GROUP=k // groups,
        FOUR=four,
        ZERO=zero is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out
