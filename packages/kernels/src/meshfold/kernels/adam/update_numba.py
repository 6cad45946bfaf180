"""Adam on the CPU: one pass over the memory, in blocks of 64 Ki elements that threads share.

Kernels are compiled for the dtypes they are called with. ``before`` is None, or the arrays that a whole step reads instead of the
ones that it writes. It is another type, so its code is compiled only for it. Blocks of states that need noise start at multiples of
64 Ki of the *global* element number, like the noise's keys. As many threads work as torch.get_num_threads() says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload
from torch import Tensor

from meshfold.kernels import float_bits as plain
from meshfold.kernels._numba import bits_at, inner, one_process_compiles, stream, torch_threads, written_out
from meshfold.kernels.adam.update import MOMENTS, PARAMETERS, Step
from meshfold.kernels.float_bits_numba import (
    bits,
    decode,
    encode,
    floats,
    from_bfloat16,
    from_bits,
    joined,
    narrowed,
    noise_at,
    scale_of,
    stochastic,
    store_master,
    wide,
)

if TYPE_CHECKING:
    from meshfold.kernels.adam.state import QuantizedState, SplitState, WholeState

_TILE = 8192  # elements: new state is computed in the cache, then written past it
_BLOCK, _SHARED = plain.NOISE_BLOCK, plain.QUANTIZED_BLOCK
_BOTH = PARAMETERS + MOMENTS
U = np.uint32
_7, _16, _31, _32, _LOW16 = U(7), U(16), U(31), np.uint64(32), U(0xFFFF)
_MAGNITUDE, _127, _255, _0, _1 = U(0x7FFFFFFF), U(127), U(255), U(0), U(1)
_M_SHIFT, _M_UNIT = U(plain.SIGNED_CODE.shift), np.float32(plain.SIGNED_CODE.unit)
_V_SHIFT, _V_UNIT = U(plain.UNSIGNED_CODE.shift), np.float32(plain.UNSIGNED_CODE.unit)
_ZERO = np.float32(0)
_INNER = dict(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inner()
def _scaled(g, c):
    return wide(g) * c[9]


@inner()
def _gradient(g, p, c, l2):
    x = _scaled(g, c)
    return x + c[8] * p if l2 else x


@inner()
def _moment(m, g, c):
    return m * c[0] + g * c[1]


@inner()
def _square(v, g, c):
    return v * c[2] + (g * g) * c[3]


@inner(error_model="numpy")
def _moved(p, m, v, c):
    return p * c[4] - (m / (np.sqrt(v) * c[6] + c[7])) * c[5]


def _cut(before, a, z):
    """Return the same elements of each array of a tuple; None for None."""


def _cut_codes(before, a, z):
    """Cut 8-bit moments like :func:`_cut`, but leave their scales whole."""


@overload(_cut, jit_options={"nogil": True}, inline="always")
def _cut_numba(before, a, z):
    if isinstance(before, types.NoneType):
        return lambda before, a, z: None
    if len(before) == 3:
        return lambda before, a, z: (before[0][a:z], before[1][a:z], before[2][a:z])
    return lambda before, a, z: (before[0][a:z], before[1][a:z], before[2][a:z], before[3][a:z])


@overload(_cut_codes, jit_options={"nogil": True}, inline="always")
def _cut_codes_numba(before, a, z):
    if isinstance(before, types.NoneType):
        return lambda before, a, z: None
    return lambda before, a, z: (before[0][a:z], before[1][a:z], before[2][a:z], before[3], before[4][a:z], before[5])


@inner(error_model="numpy")
def _whole_piece(p, m, v, before, g, c, l2):
    p_0, m_0, v_0 = (p, m, v) if before is None else before
    for i in range(p.size):
        x = _gradient(g[i], p_0[i], c, l2)
        a, b = _moment(m_0[i], x, c), _square(v_0[i], x, c)
        m[i], v[i], p[i] = a, b, _moved(p_0[i], a, b, c)


@inner(error_model="numpy")
def _whole_half(p, m, v, g, c, writes):
    if writes == PARAMETERS:
        for i in range(p.size):
            x = _scaled(g[i], c)
            p[i] = _moved(p[i], _moment(m[i], x, c), _square(v[i], x, c), c)
    else:
        for i in range(p.size):
            x = _scaled(g[i], c)
            m[i], v[i] = _moment(m[i], x, c), _square(v[i], x, c)


def _whole_block(p, m, v, before, g, c, l2, writes):
    """Step a block in place, or from ``before`` into it."""


@overload(_whole_block, jit_options=_INNER)
def _whole_block_numba(p, m, v, before, g, c, l2, writes):
    def in_place(p, m, v, before, g, c, l2, writes):
        if writes == _BOTH:
            _whole_piece(p, m, v, None, g, c, l2)
        else:
            _whole_half(p, m, v, g, c, writes)

    def into(p, m, v, before, g, c, l2, writes):
        new_p, new_m, new_v = np.empty(_TILE, p.dtype), np.empty(_TILE, m.dtype), np.empty(_TILE, v.dtype)
        for a in range(0, p.size, _TILE):
            z = min(a + _TILE, p.size)
            _whole_piece(new_p[: z - a], new_m[: z - a], new_v[: z - a], _cut(before, a, z), g[a:z], c, l2)
            stream(p, a, new_p, z - a)
            stream(m, a, new_m, z - a)
            stream(v, a, new_v, z - a)
        written_out()

    return in_place if isinstance(before, types.NoneType) else into


@inner()
def _write_copy(p, copy):
    for i in range(p.size):
        copy[i] = narrowed(p[i], copy[i])


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _step_whole(p, m, v, copy, before, g, c, l2, writes):
    for block in prange((p.size + _BLOCK - 1) // _BLOCK):
        a, z = block * _BLOCK, min(p.size, (block + 1) * _BLOCK)
        _whole_block(p[a:z], m[a:z], v[a:z], _cut(before, a, z), g[a:z], c, l2, writes)
        if copy is not None:
            _write_copy(p[a:z], copy[a:z])


@inner(error_model="numpy")
def _split_piece(hi, lo, m, v, before, g, c, l2):
    hi_0, lo_0, m_0, v_0 = (hi, lo, m, v) if before is None else before
    for i in range(hi.size):
        p = joined(hi_0[i], lo_0[i])
        x = _gradient(g[i], p, c, l2)
        a, b = _moment(m_0[i], x, c), _square(v_0[i], x, c)
        m[i], v[i] = a, b
        store_master(hi, lo, i, _moved(p, a, b, c))


@inner(error_model="numpy")
def _split_half(hi, lo, m, v, g, c, writes):
    if writes == PARAMETERS:
        for i in range(hi.size):
            p = joined(hi[i], lo[i])
            x = _scaled(g[i], c)
            a, b = _moment(m[i], x, c), _square(v[i], x, c)
            store_master(hi, lo, i, _moved(p, a, b, c))
    else:
        for i in range(hi.size):
            x = _scaled(g[i], c)
            m[i], v[i] = _moment(m[i], x, c), _square(v[i], x, c)


def _split_block(hi, lo, m, v, before, g, c, l2, writes):
    """Step a block as :func:`_whole_block` does."""


@overload(_split_block, jit_options=_INNER)
def _split_block_numba(hi, lo, m, v, before, g, c, l2, writes):
    def in_place(hi, lo, m, v, before, g, c, l2, writes):
        if writes == _BOTH:
            _split_piece(hi, lo, m, v, None, g, c, l2)
        else:
            _split_half(hi, lo, m, v, g, c, writes)

    def into(hi, lo, m, v, before, g, c, l2, writes):
        new_hi, new_lo = np.empty(_TILE, hi.dtype), np.empty(_TILE, lo.dtype)
        new_m, new_v = np.empty(_TILE, m.dtype), np.empty(_TILE, v.dtype)
        for a in range(0, hi.size, _TILE):
            z = min(a + _TILE, hi.size)
            here = (new_hi[: z - a], new_lo[: z - a], new_m[: z - a], new_v[: z - a])
            _split_piece(here[0], here[1], here[2], here[3], _cut(before, a, z), g[a:z], c, l2)
            stream(hi, a, new_hi, z - a)
            stream(lo, a, new_lo, z - a)
            stream(m, a, new_m, z - a)
            stream(v, a, new_v, z - a)
        written_out()

    return in_place if isinstance(before, types.NoneType) else into


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _step_split(hi, lo, m, v, before, g, c, l2, writes):
    for block in prange((hi.size + _BLOCK - 1) // _BLOCK):
        a, z = block * _BLOCK, min(hi.size, (block + 1) * _BLOCK)
        _split_block(hi[a:z], lo[a:z], m[a:z], v[a:z], _cut(before, a, z), g[a:z], c, l2, writes)


@inner(error_model="numpy")
def _split16_piece(hi, lo, m, v, before, g, c, l2, place, key_1, key_2):
    hi_0, lo_0, m_0, v_0 = (hi, lo, m, v) if before is None else before
    for i in range(hi.size):
        p = joined(hi_0[i], lo_0[i])
        x = _gradient(g[i], p, c, l2)
        a, b = _moment(from_bfloat16(m_0[i]), x, c), _square(from_bfloat16(v_0[i]), x, c)
        random = noise_at(U(place + U(i)), key_1, key_2)
        m[i], v[i] = stochastic(a, U(random >> _16)), stochastic(b, U(random & _LOW16))
        store_master(hi, lo, i, _moved(p, a, b, c))


@inner(error_model="numpy")
def _split16_half(hi, lo, m, v, g, c, writes, place, key_1, key_2):
    if writes == PARAMETERS:
        for i in range(hi.size):
            p = joined(hi[i], lo[i])
            x = _scaled(g[i], c)
            a, b = _moment(from_bfloat16(m[i]), x, c), _square(from_bfloat16(v[i]), x, c)
            store_master(hi, lo, i, _moved(p, a, b, c))
    else:
        for i in range(hi.size):
            random = noise_at(U(place + U(i)), key_1, key_2)
            x = _scaled(g[i], c)
            a, b = _moment(from_bfloat16(m[i]), x, c), _square(from_bfloat16(v[i]), x, c)
            m[i], v[i] = stochastic(a, U(random >> _16)), stochastic(b, U(random & _LOW16))


def _split16_block(hi, lo, m, v, before, g, c, l2, writes, place, key_1, key_2):
    """Step a block as :func:`_whole_block` does."""


@overload(_split16_block, jit_options=_INNER)
def _split16_block_numba(hi, lo, m, v, before, g, c, l2, writes, place, key_1, key_2):
    def in_place(hi, lo, m, v, before, g, c, l2, writes, place, key_1, key_2):
        if writes == _BOTH:
            _split16_piece(hi, lo, m, v, None, g, c, l2, place, key_1, key_2)
        else:
            _split16_half(hi, lo, m, v, g, c, writes, place, key_1, key_2)

    def into(hi, lo, m, v, before, g, c, l2, writes, place, key_1, key_2):
        new_hi, new_lo = np.empty(_TILE, hi.dtype), np.empty(_TILE, lo.dtype)
        new_m, new_v = np.empty(_TILE, m.dtype), np.empty(_TILE, v.dtype)
        for a in range(0, hi.size, _TILE):
            z = min(a + _TILE, hi.size)
            here, at = (new_hi[: z - a], new_lo[: z - a], new_m[: z - a], new_v[: z - a]), U(place + U(a))
            _split16_piece(here[0], here[1], here[2], here[3], _cut(before, a, z), g[a:z], c, l2, at, key_1, key_2)
            stream(hi, a, new_hi, z - a)
            stream(lo, a, new_lo, z - a)
            stream(m, a, new_m, z - a)
            stream(v, a, new_v, z - a)
        written_out()

    return in_place if isinstance(before, types.NoneType) else into


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _step_split16(hi, lo, m, v, before, g, c, l2, writes, state, start):
    for block in prange(start // _BLOCK, (start + hi.size + _BLOCK - 1) // _BLOCK):
        a, z = max(block * _BLOCK - start, 0), min((block + 1) * _BLOCK - start, hi.size)
        place, key = U(a + start - block * _BLOCK), bits_at(state, np.uint64(block))
        was, key_1, key_2 = _cut(before, a, z), U(key), U(key >> _32)
        _split16_block(hi[a:z], lo[a:z], m[a:z], v[a:z], was, g[a:z], c, l2, writes, place, key_1, key_2)


@inner(error_model="numpy")
def _largest(x):
    """Return the largest magnitude, or NaN. Bit patterns sort as the magnitudes do, NaN last."""
    top = _0
    for i in range(x.size):
        top = max(top, U(bits(x[i]) & _MAGNITUDE))
    return from_bits(U(top))


@inner(error_model="numpy")
def _quantized_piece(
    hi, lo, m, m_scale, v, v_scale, before, block, g, c, l2, writes, place, key_1, key_2, wide_m, wide_v
):
    """One block of (up to) 256 elements."""
    hi_0, lo_0, m_0, m_scale_0, v_0, v_scale_0 = (hi, lo, m, m_scale, v, v_scale) if before is None else before
    old_m, old_v = m_scale_0[block], v_scale_0[block]
    for i in range(hi.size):
        p = joined(hi_0[i], lo_0[i])
        x = _gradient(g[i], p, c, l2)
        code = U(m_0[i])
        a = decode(U(code & _127), old_m, _M_SHIFT)
        a = from_bits(U(bits(a) | U(U(code >> _7) << _31)))
        a, b = _moment(a, x, c), _square(decode(U(v_0[i]), old_v, _V_SHIFT), x, c)
        wide_m[i], wide_v[i] = a, b
        if writes & PARAMETERS:
            store_master(hi, lo, i, _moved(p, a, b, c))
    if writes & MOMENTS:
        m_new, m_inverse = scale_of(_largest(wide_m[: hi.size]), _M_UNIT)
        v_new, v_inverse = scale_of(_largest(wide_v[: hi.size]), _V_UNIT)
        for i in range(hi.size):
            random = noise_at(U(place + U(i)), key_1, key_2)
            u = bits(wide_m[i])
            q = encode(from_bits(U(u & _MAGNITUDE)), m_inverse, U(random >> _16), _M_SHIFT, _127)
            m[i] = np.uint8(U(q | U(U(u >> _31) << _7)))
            q = encode(wide_v[i], v_inverse, U(random & _LOW16), _V_SHIFT, _255)
            v[i] = np.uint8(max(q, _1 if wide_v[i] > _ZERO else _0))
        m_scale[block], v_scale[block] = m_new, v_new


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _step_quantized(hi, lo, m, m_scale, v, v_scale, before, g, c, l2, writes, state, start):
    for block in prange(start // _BLOCK, (start + hi.size + _BLOCK - 1) // _BLOCK):
        wide_m, wide_v = np.empty(_SHARED, np.float32), np.empty(_SHARED, np.float32)
        key = bits_at(state, np.uint64(block))
        key_1, key_2 = U(key), U(key >> _32)
        low, stop = max(block * _BLOCK - start, 0), min((block + 1) * _BLOCK - start, hi.size)
        for a in range(low, stop, _SHARED):
            z = min(a + _SHARED, stop)
            was = _cut_codes(before, a, z)
            place = U(a + start - block * _BLOCK)
            _quantized_piece(
                hi[a:z],
                lo[a:z],
                m[a:z],
                m_scale,
                v[a:z],
                v_scale,
                was,
                a // _SHARED,
                g[a:z],
                c,
                l2,
                writes,
                place,
                key_1,
                key_2,
                wide_m,
                wide_v,
            )


def _common(grad: Tensor, step: Step) -> tuple[Any, ...]:
    """Return the arguments that all kernels take after the state."""
    s = step.scalars
    c = (s.beta1, s.rest1, s.beta2, s.rest2, s.keep, s.step_size, s.correction, s.eps, s.l2, float(step.grad_scale))
    return floats(grad), tuple(map(np.float32, c)), s.l2 != 0.0, step.writes


def _random(step: Step) -> tuple[Any, ...]:
    """Return the last arguments of kernels that round stochastically."""
    return np.uint64(step.noise & 0xFFFFFFFFFFFFFFFF), step.start


def _arrays(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(map(floats, tensors))


def step_whole(state: WholeState, grad: Tensor, step: Step, before: WholeState | None) -> None:
    p = state.parameter
    copy = floats(state.copy) if state.copy is not None and step.writes & PARAMETERS else None
    was = None if before is None else _arrays(before.parameter, before.exp_avg, before.exp_avg_sq)
    with torch_threads():
        _step_whole(*_arrays(p, state.exp_avg, state.exp_avg_sq), copy, was, *_common(grad, step))


def step_split(state: SplitState, grad: Tensor, step: Step, before: SplitState | None) -> None:
    tensors = _arrays(state.hi, state.lo, state.exp_avg, state.exp_avg_sq)
    was = None if before is None else _arrays(before.hi, before.lo, before.exp_avg, before.exp_avg_sq)
    common = _common(grad, step)
    with torch_threads():
        if state.exp_avg.dtype is torch.float32:
            _step_split(*tensors, was, *common)
        else:
            _step_split16(*tensors, was, *common, *_random(step))


def step_quantized(state: QuantizedState, grad: Tensor, step: Step, before: QuantizedState | None) -> None:
    was = None if before is None else _quantized_arrays(before)
    common = _common(grad, step)
    with torch_threads():
        _step_quantized(*_quantized_arrays(state), was, *common, *_random(step))


def _quantized_arrays(s: QuantizedState) -> tuple[Any, ...]:
    return _arrays(s.hi, s.lo, s.exp_avg, s.exp_avg_scale, s.exp_avg_sq, s.exp_avg_sq_scale)
