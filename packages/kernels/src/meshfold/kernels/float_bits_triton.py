"""Numbers as bits in Triton: the same bits as the torch reference. bfloat16 comes and goes as int16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import bits_at, cdiv, launch

_TILE = 1024


@triton.jit
def bits(x):
    """Return the bits of float32 as uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def from_bits(u):
    """Return the float32 with the bits of uint32."""
    return u.to(tl.float32, bitcast=True)


@triton.jit
def is_nan(u):
    return (u & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def from_bfloat16(h):
    """Return the float32 of a bfloat16 given as int16."""
    return from_bits(h.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def to_bfloat16(x):
    """Round float32 to bfloat16, to the nearest, ties to even, as int16."""
    u = bits(x)
    near = u + 0x7FFF + ((u >> 16) & 1)
    return (tl.where(is_nan(u), 0x7FC00000, near) >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def split(x):
    """(hi, lo) of a float32 master, both as int16."""
    u = bits(x)
    u = tl.where(is_nan(u), (u & 0x80000000) | 0x7FC00000, u)
    hi = (u + 0x8000) >> 16
    lo = u - (hi << 16)
    return hi.to(tl.uint16).to(tl.int16, bitcast=True), (lo & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def join(hi, lo):
    """Return the float32 master of hi and lo, both given as int16."""
    upper = hi.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return from_bits(upper + lo.to(tl.int32).to(tl.uint32, bitcast=True))


@triton.jit
def noise_at(state, first, index):
    """32 random bits for the elements ``index`` (int64), all less than 64 Ki behind ``first``."""
    block = first >> 16
    here = (index >> 16) == block
    key_here, key_next = bits_at(state, block), bits_at(state, block + 1)
    key_1 = tl.where(here, key_here.to(tl.uint32), key_next.to(tl.uint32))
    key_2 = tl.where(here, (key_here >> 32).to(tl.uint32), (key_next >> 32).to(tl.uint32))
    x = (index & 0xFFFF).to(tl.uint32) ^ key_1
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + key_2) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stochastic(x, noise16):
    """float32 to bfloat16 as int16."""
    u = bits(x)
    up = tl.where(is_nan(u), u | 0x400000, u + noise16)
    return (up >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def scale_of(largest, UNIT: tl.constexpr, SMALLEST: tl.constexpr):
    """(scale, 1 / scale) of blocks."""
    empty = largest < SMALLEST
    scale = tl.where(empty, 0.0, largest * UNIT)
    return scale, tl.where(empty, 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(empty, 1.0, scale)))


@triton.jit
def encode(magnitude, inverse, noise16, SHIFT: tl.constexpr, LAST: tl.constexpr):
    w = magnitude * inverse + 3.0517578125e-05
    extra: tl.constexpr = SHIFT - 16
    q = (bits(w) - 0x38000000 + (noise16 << extra) + (1 << (extra - 1))) >> SHIFT
    return tl.minimum(q, LAST)


@triton.jit
def decode(q, scale, SHIFT: tl.constexpr):
    return (from_bits((q << SHIFT) + 0x38000000) - 3.0517578125e-05) * scale


@triton.jit
def _split(x, hi, lo, n, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = place < n
    upper, lower = split(tl.load(x + place, mask=mask, other=0.0))
    tl.store(hi + place, upper, mask=mask)
    tl.store(lo + place, lower, mask=mask)


@triton.jit
def _join(hi, lo, x, n, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = place < n
    joined = join(tl.load(hi + place, mask=mask, other=0), tl.load(lo + place, mask=mask, other=0))
    tl.store(x + place, joined, mask=mask)


def raw(x: Tensor) -> Tensor:
    """Return the bits of a bfloat16 tensor as int16; any other tensor unchanged."""
    x = x.detach()
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def split_into(x: Tensor, hi: Tensor, lo: Tensor) -> None:
    grid = (cdiv(x.numel(), _TILE),)
    launch(_split, grid, x, x, raw(hi), lo, x.numel(), TILE=_TILE, num_warps=4)


def join_into(hi: Tensor, lo: Tensor, x: Tensor) -> None:
    grid = (cdiv(x.numel(), _TILE),)
    launch(_join, grid, x, raw(hi), lo, x, x.numel(), TILE=_TILE, num_warps=4)
