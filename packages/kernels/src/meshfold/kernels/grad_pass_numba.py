"""The pass over a gradient on the CPU: threads share the global blocks, lanes are added in the cache."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from meshfold.kernels import grad_pass as plain
from meshfold.kernels._numba import inner, one_process_compiles, torch_threads
from meshfold.kernels.float_bits_numba import bits, floats, from_bits, wide
from meshfold.kernels.grad_pass import LANES, LARGEST, SQUARES, touched

U = np.uint32
_MAGNITUDE = U(0x7FFFFFFF)


@inner(error_model="numpy")
def _add(lanes, x, norm):
    """Add elements to lanes, one each."""
    if norm == SQUARES:
        for i in range(x.size):
            value = np.float64(wide(x[i]))
            lanes[i] += value * value
    else:
        for i in range(x.size):
            lanes[i] += np.float64(abs(wide(x[i])))


@inner(error_model="numpy")
def _combined(lanes):
    """Return the pairwise sum of the lanes."""
    half = LANES // 2
    while half > 0:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _sums(found, x, norm, block, start):
    """Write one partial sum per block to ``found``."""
    first = start // block
    for number in prange(found.size):
        begin = (first + number) * block - start
        a, z = max(begin, 0), min(begin + block, x.size)
        lanes = np.zeros(LANES, np.float64)
        while a < z:
            lane = (a - begin) % LANES
            stop = min(z, a + LANES - lane)
            _add(lanes[lane:], x[a:stop], norm)
            a = stop
        found[number] = _combined(lanes)


@inner(error_model="numpy")
def _largest(x):
    """Return the largest magnitude, or NaN. Bit patterns sort as the magnitudes do, NaN last."""
    top = U(0)
    for i in range(x.size):
        top = max(top, U(bits(wide(x[i])) & _MAGNITUDE))
    return np.float64(from_bits(U(top)))


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _all_largest(found, x, block, start):
    """Write the largest magnitude of each block to ``found``."""
    first = start // block
    for number in prange(found.size):
        begin = (first + number) * block - start
        found[number] = _largest(x[max(begin, 0) : min(begin + block, x.size)])


def partials(x: Tensor, norm: int, block: int, start: int) -> Tensor:
    found = torch.empty(touched(x.numel(), block, start), dtype=torch.float64)
    with torch_threads():
        if norm == LARGEST:
            _all_largest(found.numpy(), floats(x), block, start)
        else:
            _sums(found.numpy(), floats(x), norm, block, start)
    return found


def write(source: Tensor, out: Tensor, add: bool) -> None:
    plain.write(source, out, add)  # torch's copy already runs at memory bandwidth
