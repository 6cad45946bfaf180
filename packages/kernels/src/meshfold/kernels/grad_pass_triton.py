"""The pass over a gradient in Triton: a program a global block, 1024 lanes in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.float_bits_triton import bits, from_bfloat16, raw, to_bfloat16
from meshfold.kernels.grad_pass import LANES, LARGEST, SQUARES, touched

_OUT = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_TILE = 1024  # elements that a program writes
_ROWS = 4  # rows loaded at a time: with one, every row waits for memory (H200: 0.9 TB/s, 3.2 with four)


@triton.jit
def _pass(
    source,
    found,
    n,
    start,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BF16: tl.constexpr,
    SQUARE: tl.constexpr,
    LARGEST: tl.constexpr,
    HALVINGS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    top = tl.zeros([LANES], tl.int32)
    begin = tl.program_id(0).to(tl.int64) * BLOCK - start % BLOCK
    for row in range(0, BLOCK, LANES * AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            place = begin + row + k * LANES + lane
            mask = (place >= 0) & (place < n)
            x = tl.load(source + place, mask=mask, other=0)
            x = from_bfloat16(x) if BF16 else x.to(tl.float32)
            magnitude = bits(x) & 0x7FFFFFFF
            if LARGEST:  # bit patterns sort as the magnitudes do, NaN last
                top = tl.maximum(top, magnitude.to(tl.int32, bitcast=True))
            else:
                wide = magnitude.to(tl.float32, bitcast=True).to(tl.float64)
                total += wide * wide if SQUARE else wide
    if LARGEST:
        tl.store(found + tl.program_id(0), tl.max(top, axis=0).to(tl.float32, bitcast=True).to(tl.float64))
    else:
        # Two numbers have one order of summation, so this tree is deterministic.
        for k in tl.static_range(HALVINGS):
            total = tl.sum(tl.reshape(total, (2, LANES >> (k + 1))), axis=0)
        tl.store(found + tl.program_id(0) + tl.arange(0, 1), total)


@triton.jit
def _write(
    source,
    out,
    n,
    BF16: tl.constexpr,
    OUT: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = place < n
    x = tl.load(source + place, mask=mask, other=0)
    x = from_bfloat16(x) if BF16 else x.to(tl.float32)
    if ADD:
        there = tl.load(out + place, mask=mask, other=0)
        x = (from_bfloat16(there) if OUT == 2 else there.to(tl.float32)) + x
    if OUT == 1:
        tl.store(out + place, x, mask=mask)
    if OUT == 2:
        tl.store(out + place, to_bfloat16(x), mask=mask)
    if OUT == 3:
        tl.store(out + place, x.to(tl.float16), mask=mask)


def partials(x: Tensor, norm: int, block: int, start: int) -> Tensor:
    found = torch.empty(touched(x.numel(), block, start), dtype=torch.float64, device=x.device)
    launch(
        _pass,
        (found.numel(),),
        x,
        raw(x),
        found,
        x.numel(),
        start,
        BLOCK=block,
        LANES=LANES,
        BF16=x.dtype is torch.bfloat16,
        SQUARE=norm == SQUARES,
        LARGEST=norm == LARGEST,
        HALVINGS=LANES.bit_length() - 1,
        AT_ONCE=1 if block % (_ROWS * LANES) else _ROWS,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return found


def write(source: Tensor, out: Tensor, add: bool) -> None:
    n = source.numel()
    launch(
        _write,
        (cdiv(n, _TILE),),
        source,
        raw(source),
        raw(out),
        n,
        BF16=source.dtype is torch.bfloat16,
        OUT=_OUT[out.dtype],
        ADD=add,
        TILE=_TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
