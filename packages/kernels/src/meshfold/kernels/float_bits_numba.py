"""Floating-point numbers as bits on the CPU: the same bits as the torch reference, in loops that LLVM vectorises.

numba widens every integer operation to 64 bits, so results are cut back to 32 after each: LLVM then works in 32.
Numba has no bfloat16 and no float16 on the CPU: :func:`floats` gives them as uint16 and int16, and ``wide`` and ``narrowed``
choose the conversion by that type. So a kernel is only compiled for the dtypes that are used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload
from torch import Tensor

from meshfold.kernels import float_bits as plain
from meshfold.kernels._numba import inner, one_process_compiles, torch_threads

_BLOCK = plain.NOISE_BLOCK
_AS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}

U = np.uint32
_SIGN, _MAGNITUDE, _INFINITY, _QUIET = U(0x80000000), U(0x7FFFFFFF), U(0x7F800000), U(0x7FC00000)
_HALF, _QUIET_BIT, _ONE, _ALMOST_HALF = U(0x8000), U(0x400000), U(1), U(0x7FFF)
_15, _16 = U(15), U(16)
_MIX_1, _MIX_2, _BASE = U(plain.MIX_1), U(plain.MIX_2), U(plain.BASE)
_FLOOR, _SMALLEST_SCALED = np.float32(plain.FLOOR), np.float32(plain.SMALLEST_SCALED)
_ZERO, _UNIT = np.float32(0), np.float32(1)


@intrinsic
def bits(typing, x):
    """Return the bits of a float32 as uint32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def from_bits(typing, u):
    """Return the float32 with the bits of a uint32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def from_half(typing, h):
    """Return the float32 of a float16 that is given as int16."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def to_half(typing, x):
    """Return a float32 rounded to the nearest float16, as int16."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@inner()
def from_bfloat16(h):
    return from_bits(U(U(h) << _16))


@inner()
def to_bfloat16(x):
    """Round a float32 to bfloat16, to the nearest, ties to even, as uint16."""
    u = bits(x)
    near = U(U(u + _ALMOST_HALF) + U(U(u >> _16) & _ONE))
    return np.uint16((_QUIET if U(u & _MAGNITUDE) > _INFINITY else near) >> _16)


def wide(x):
    """Convert an element of :func:`floats` to float32."""
    raise NotImplementedError("only for compiled kernels")


@overload(wide)
def _wide(x):
    if x == types.float32:
        return lambda x: x
    return (lambda x: from_bfloat16(x)) if x == types.uint16 else (lambda x: from_half(x))


def narrowed(x, like):
    """Round a float32 to the dtype of ``like``, an element of :func:`floats`."""
    raise NotImplementedError("only for compiled kernels")


@overload(narrowed)
def _narrowed(x, like):
    return (lambda x, like: to_bfloat16(x)) if like == types.uint16 else (lambda x, like: to_half(x))


@inner()
def hi_of(u):
    """Return the upper plane of master bits, as uint32; of bits that :func:`canonical` has seen."""
    return U(U(u + _HALF) >> _16)


@inner()
def canonical(u):
    """Return the same bits, but one NaN for all."""
    return U(U(u & _SIGN) | _QUIET) if U(u & _MAGNITUDE) > _INFINITY else u


@inner()
def joined(hi, lo):
    """Return the float32 of a uint16 and an int16."""
    return from_bits(U(U(U(hi) << _16) + U(lo)))


@inner()
def noise_at(place, key_1, key_2):
    """32 random bits for an element's place in its block of 64 Ki."""
    x = U(place ^ key_1)
    x = U(x ^ U(x >> _16))
    x = U(x * _MIX_1)
    x = U(x ^ U(x >> _15))
    x = U(x + key_2)
    x = U(x * _MIX_2)
    return U(x ^ U(x >> _16))


@inner()
def stochastic(x, noise16):
    """float32 to bfloat16 as uint16."""
    u = bits(x)
    up = U(u | _QUIET_BIT) if U(u & _MAGNITUDE) > _INFINITY else U(u + noise16)
    return np.uint16(up >> _16)


@inner()
def scale_of(largest, unit):
    """(scale, 1 / scale) of a block."""
    if largest < _SMALLEST_SCALED:
        return _ZERO, _ZERO
    scale = largest * unit
    return scale, _UNIT / scale


@inner()
def encode(magnitude, inverse, noise16, shift, last):
    w = magnitude * inverse + _FLOOR
    extra = U(shift - _16)
    q = U(U(bits(w) - _BASE) + U(U(noise16 << extra) + U(_ONE << U(extra - _ONE)))) >> shift
    return U(min(U(q), last))


@inner()
def decode(q, scale, shift):
    return (from_bits(U(U(q << shift) + _BASE)) - _FLOOR) * scale


def floats(x: Tensor) -> Any:
    """Return the memory of a CPU tensor as a NumPy array; bfloat16 as uint16 and float16 as int16."""
    x = x.detach()
    return (x.view(_AS[x.dtype]) if x.dtype in _AS else x).numpy()


@inner(error_model="numpy")
def store_master(hi, lo, i, p):
    """Store a float32 number as the two halves of a master weight: bfloat16, and the 16 bits that it lacks."""
    u = canonical(bits(p))
    h = hi_of(u)
    hi[i] = np.uint16(h)
    lo[i] = np.int16(U(u - U(h << _16)))


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True)
def _split(x, hi, lo):
    for block in prange((x.size + _BLOCK - 1) // _BLOCK):
        for i in range(block * _BLOCK, min(x.size, (block + 1) * _BLOCK)):
            store_master(hi, lo, i, x[i])


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True)
def _join(hi, lo, x):
    for block in prange((x.size + _BLOCK - 1) // _BLOCK):
        for i in range(block * _BLOCK, min(x.size, (block + 1) * _BLOCK)):
            x[i] = joined(hi[i], lo[i])


def split_into(x: Tensor, hi: Tensor, lo: Tensor) -> None:
    with torch_threads():
        _split(floats(x), floats(hi), floats(lo))


def join_into(hi: Tensor, lo: Tensor, x: Tensor) -> None:
    with torch_threads():
        _join(floats(hi), floats(lo), floats(x))
