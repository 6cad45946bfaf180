"""Floating-point numbers as bits: the split master weight, stochastic rounding and 8-bit codes, in plain torch.

The numba and Triton twins of these functions are next to this file and give the same bits. Here the bits of a float32 are an int64
from 0 to 2**32 - 1, because torch has no unsigned arithmetic; a mask cuts products to 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.inputs import check_flat
from meshfold.kernels.random_bits import bits_of, signed, splitmix64

LOW = 0xFFFFFFFF
NOISE_BLOCK = 1 << 16  # elements that share a key of the noise
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B

QUANTIZED_BLOCK = 256  # elements that share a scale of the 8-bit codes
SMALLEST_SCALED = 2.0**-100  # a block whose largest magnitude is below this is stored as zeros


@dataclass(frozen=True, kw_only=True)
class Minifloat:
    """An 8-bit code of the numbers 0 to 1 whose spacing grows with the number, as a float's does.

    Code ``q`` stands for ``w(q) - w(0)``, where ``w(q)`` is the float32 with the bits ``(q << shift) + BASE``: 16 octaves of
    ``2**mantissa`` codes. Subtracting ``w(0)`` makes 0 the first code and gives gradual underflow. Between neighbouring codes a
    float is linear in its bits. Adding uniform noise to the bits that are cut off thus rounds stochastically without bias, in
    integer arithmetic that is the same on every device.

    Attributes:
        mantissa: bits of the mantissa.
    """

    mantissa: int

    @property
    def shift(self) -> int:
        """The number of bits of a float32 that are cut off."""
        return 23 - self.mantissa

    @property
    def last(self) -> int:
        """The largest code."""
        return (16 << self.mantissa) - 1

    @property
    def unit(self) -> float:
        """The scale of a block whose largest magnitude is 1, in float32: ``1 / (w(last) - w(0))``."""
        return rounded(1.0 / (2.0 - 2.0**-self.mantissa - FLOOR))


BASE = (127 - 15) << 23  # the bits of w(0)
FLOOR = 2.0**-15  # w(0)
SIGNED_CODE = Minifloat(mantissa=3)  # plus a sign bit
UNSIGNED_CODE = Minifloat(mantissa=4)


def rounded(value: float) -> float:
    """Return the float32 nearest to ``value``."""
    return float(np.float32(value))


def bits(x: Tensor) -> Tensor:
    """Return the bits of a float32 tensor, as int64."""
    return x.view(torch.int32).to(torch.int64) & LOW


def from_bits(u: Tensor) -> Tensor:
    """Return the float32 tensor with these bits."""
    return u.to(torch.int32).view(torch.float32)


def is_nan(u: Tensor) -> Tensor:
    """Return a mask of the bits that are a NaN's."""
    return (u & 0x7FFFFFFF) > 0x7F800000


@torch.no_grad()
def split_master(x: Tensor) -> tuple[Tensor, Tensor]:
    """``n -> n, n``: float32 in two planes of 2 bytes an element.

    With ``u`` the bits of an element, ``hi = (u + 0x8000) >> 16``, its bfloat16 rounded half up, and
    ``lo = u - (hi << 16)`` as int16. :func:`join_master` inverts it to the bit for every finite number and infinity; a
    NaN becomes the quiet NaN of its sign. Half up, and not to even: at ties, two masters would share one pair.

    Args:
        x: flat, contiguous, float32.

    Returns:
        ``hi`` (bfloat16) and ``lo`` (int16).

    Raises:
        TypeError: for another dtype.
        ValueError: if ``x`` is not flat and contiguous.
    """
    check_flat("x", x, (torch.float32,))
    hi, lo = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
    dispatch.twin(split_into, x)(x.detach(), hi, lo)
    return hi, lo


@torch.no_grad()
def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """``n, n -> n``: the float32 of two planes; the inverse of :func:`split_master`.

    Raises:
        TypeError: unless ``hi`` is bfloat16 and ``lo`` int16.
        ValueError: unless both are flat, contiguous, of one length and on one device.
    """
    check_flat("hi", hi, (torch.bfloat16,))
    check_flat("lo", lo, (torch.int16,), hi)
    x = torch.empty_like(hi, dtype=torch.float32)
    dispatch.twin(join_into, x)(hi.detach(), lo.detach(), x)
    return x


def split_into(x: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Write ``hi`` and ``lo``."""
    upper, lower = split(x)
    hi.copy_(upper)
    lo.copy_(lower)


def join_into(hi: Tensor, lo: Tensor, x: Tensor) -> None:
    """Write ``x``."""
    x.copy_(join(hi, lo))


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """``n -> n, n``: float32 to its bfloat16, rounded half up, and the int16 that it lacks."""
    u = bits(x)
    u = torch.where(is_nan(u), (u & 0x80000000) | 0x7FC00000, u)
    hi = (u + 0x8000) >> 16
    return hi.to(torch.int16).view(torch.bfloat16), (u - (hi << 16)).to(torch.int16)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Join the two planes that :func:`split` returns."""
    return from_bits((hi.view(torch.int16).to(torch.int64) << 16) + lo)


def noise(state: int, start: int, count: int, device: torch.device) -> Tensor:
    """32 random bits, as int64, for each of the elements ``start`` to ``start + count`` of a stream.

    The 64 bits of random_bits at the number of the element's block of 64 Ki are the key. A 32-bit mixer combines it with the place
    in the block: four times cheaper on a CPU than 64 bits an element. The mixer is lowbias32 (C. Wellons, "Prospecting for hash
    functions", 2018) with the key's second half added between its rounds.
    """
    index = torch.arange(start, start + count, device=device)
    key = bits_of(state, index >> 16)
    x = (index & 0xFFFF) ^ (key & LOW)
    x = x ^ (x >> 16)
    x = (x * MIX_1) & LOW
    x = x ^ (x >> 15)
    x = (x + ((key >> 32) & LOW)) & LOW
    x = (x * MIX_2) & LOW
    return x ^ (x >> 16)


def noise_key(step: int) -> int:
    """Return the key of :func:`~meshfold.kernels.random_bits.stream` for one optimizer step."""
    return signed(splitmix64(step ^ 0x6164616D_6E6F6973))  # seeds are small numbers: keep away from them


def stochastic(x: Tensor, noise16: Tensor) -> Tensor:
    """float32 to bfloat16, rounded up with a probability equal to the truncated fraction; ``noise16`` is 0 to 65535."""
    u = bits(x)
    up = torch.where(is_nan(u), u | 0x400000, u + noise16)
    return (up >> 16).to(torch.int16).view(torch.bfloat16)


def scales(largest: Tensor, code: Minifloat) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) of blocks from their largest magnitudes; 0 and 0 for blocks of all but zeros."""
    scale = torch.where(largest < SMALLEST_SCALED, 0.0, largest * code.unit)
    return scale, torch.where(scale == 0.0, 0.0, 1.0 / scale)


def encode(magnitude: Tensor, inverse: Tensor, noise16: Tensor, code: Minifloat) -> Tensor:
    """Return codes, as int64, of magnitudes over their block's scale, rounded stochastically."""
    w = magnitude * inverse + FLOOR
    extra = code.shift - 16
    q = (bits(w) - BASE + (noise16 << extra) + (1 << (extra - 1))) >> code.shift
    return q.clamp(max=code.last)


def decode(q: Tensor, scale: Tensor, code: Minifloat) -> Tensor:
    """Return the magnitudes of codes, float32."""
    return (from_bits((q.to(torch.int64) << code.shift) + BASE) - FLOOR) * scale
