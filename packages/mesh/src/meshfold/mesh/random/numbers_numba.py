"""Random numbers on the CPU by numba: the bits of :mod:`meshfold.mesh.random.numbers`, in one pass over memory.

torch makes a normal number in some sixty passes over blocks of temporaries, 45 ns of one core an element; this loop takes a
fraction. Every operation is the reference's, in its order: no fast math, no fused multiply-add, so every bit is the same.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from meshfold.mesh.random.numbers import LOG, M1, M2, SIN, SQRT_HALF_BITS

_M1, _M2 = np.uint64(M1), np.uint64(M2)
_11, _27, _30, _31, _40 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(40)
_ONE, _52, _SQRT_HALF = np.uint64(1), np.int64(52), np.int64(SQRT_HALF_BITS)
_TO_UNIT, _TO_TURN, _TO_UNIT_32 = 2.0**-53, 2.0**-54, np.float32(2.0**-24)
_LOG_2 = math.log(2.0)


@intrinsic
def _bits(typing, x):
    """Return the bits of a float64 as int64."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def _from_bits(typing, u):
    """Return the float64 with the bits of an int64."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@njit(inline="always")
def _mix(z):
    z = (z ^ (z >> _30)) * _M1
    z = (z ^ (z >> _27)) * _M2
    return z ^ (z >> _31)


@njit(inline="always")
def _normal(first, second):
    u = np.float64((_mix(first) >> _11) + _ONE) * _TO_UNIT
    bits = _bits(u)
    exponent = (bits - _SQRT_HALF) >> _52
    m = _from_bits(bits - (exponent << _52))
    s = (m - 1.0) / (m + 1.0)
    x = s * s
    p = x * LOG[7]
    p = (p + LOG[6]) * x
    p = (p + LOG[5]) * x
    p = (p + LOG[4]) * x
    p = (p + LOG[3]) * x
    p = (p + LOG[2]) * x
    p = (p + LOG[1]) * x
    radius = (p + LOG[0]) * s + np.float64(exponent) * _LOG_2
    radius = math.sqrt(radius * -2.0)
    y = np.float64(_mix(second) >> _11) * _TO_TURN - 0.25
    x = y * y
    p = x * SIN[8]
    p = (p + SIN[7]) * x
    p = (p + SIN[6]) * x
    p = (p + SIN[5]) * x
    p = (p + SIN[4]) * x
    p = (p + SIN[3]) * x
    p = (p + SIN[2]) * x
    p = (p + SIN[1]) * x
    return (p + SIN[0]) * y * radius


@njit(cache=True, nogil=True, error_model="numpy")
def fill_normal(out, rows, columns, first, second, std, mean):
    """Write normal numbers at every row's and column's counter; ``first`` and ``second``: the streams' states plus G."""
    for r in range(out.shape[0]):
        for c in range(out.shape[1]):
            counter = rows[r] + columns[c]
            out[r, c] = _normal(counter + first, counter + second) * std + mean


@njit(cache=True, nogil=True, error_model="numpy")
def fill_uniform_64(out, rows, columns, first, width, low):
    """Write uniform numbers of 53 bits in ``low + width * [0, 1)``, otherwise as :func:`fill_normal`."""
    for r in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[r, c] = np.float64(_mix(rows[r] + columns[c] + first) >> _11) * _TO_UNIT * width + low


@njit(cache=True, nogil=True, error_model="numpy")
def fill_uniform_32(out, rows, columns, first, width, low):
    """Write uniform numbers of 24 bits, computed in float32 as their result; otherwise as :func:`fill_uniform_64`."""
    for r in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[r, c] = np.float32(_mix(rows[r] + columns[c] + first) >> _40) * _TO_UNIT_32 * width + low
