"""Steps of LAMB and LARS on the CPU: one pass over the memory, in blocks that threads share."""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from torch import Tensor

from meshfold.kernels._numba import inner, one_process_compiles, torch_threads
from meshfold.kernels.layerwise import LambScalars, LarsScalars

_BLOCK = 65536


@inner(error_model="numpy")
def _direct(p, g, m, v, out, c):
    for i in range(p.size):
        m[i] = m[i] + c[0] * (g[i] - m[i])
        v[i] = v[i] * c[1] + c[2] * (g[i] * g[i])
        out[i] = m[i] / (np.sqrt(v[i]) / c[4] + c[3]) / c[5] + c[6] * p[i]


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _direction(p, g, m, v, out, c):
    for block in prange((p.size + _BLOCK - 1) // _BLOCK):
        a, z = block * _BLOCK, min(p.size, (block + 1) * _BLOCK)
        _direct(p[a:z], g[a:z], m[a:z], v[a:z], out[a:z], c)


@inner(error_model="numpy")
def _move(p, g, b, c, momentum, first, nesterov):
    if momentum:
        for i in range(p.size):
            d = (g[i] + c[0] * p[i]) * c[1]
            kept = d if first else b[i] * c[2] + c[3] * d
            b[i] = kept
            p[i] = p[i] - c[4] * (d + c[2] * kept if nesterov else kept)
    else:
        for i in range(p.size):
            p[i] = p[i] - c[4] * ((g[i] + c[0] * p[i]) * c[1])


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _step(p, g, b, c, momentum, first, nesterov):
    for block in prange((p.size + _BLOCK - 1) // _BLOCK):
        a, z = block * _BLOCK, min(p.size, (block + 1) * _BLOCK)
        _move(p[a:z], g[a:z], b[a:z], c, momentum, first, nesterov)


def direction(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, out: Tensor, scalars: LambScalars
) -> None:
    p = parameter.numpy()
    numbers = (
        1 - scalars.beta1,
        scalars.beta2,
        1 - scalars.beta2,
        scalars.eps,
        scalars.correction2,
        scalars.correction1,
    )
    c = np.array([*numbers, scalars.weight_decay], dtype=p.dtype)
    with torch_threads():
        _direction(p, gradient.numpy(), mean.numpy(), square.numpy(), out.numpy(), c)


def step(parameter: Tensor, gradient: Tensor, buffer: Tensor, ratio: float, scalars: LarsScalars) -> None:
    p = parameter.numpy()
    numbers = (scalars.weight_decay, ratio, scalars.momentum, 1 - scalars.dampening, scalars.lr)
    c = np.array(numbers, dtype=p.dtype)
    with torch_threads():
        _step(p, gradient.numpy(), buffer.numpy(), c, bool(scalars.momentum), scalars.first, scalars.nesterov)
