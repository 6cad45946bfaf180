"""The pass over a gradient on the CPU: threads share the global blocks, lanes are added in the cache."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from meshfold.kernels.compiling import one_process_compiles
from meshfold.kernels.float_bits.numba_kernels import DTYPES, bits, from_bits, widen
from meshfold.kernels.gradients import reference
from meshfold.kernels.gradients.interface import LANES, LARGEST, SQUARES
from meshfold.kernels.gradients.reference import touched
from meshfold.kernels.threads import as_bytes, torch_threads

U = np.uint32
_ROWS = 4
_PIECE = _ROWS * LANES
_MAGNITUDE = U(0x7FFFFFFF)
_ZERO = np.float32(0)


@njit(nogil=True, error_model="numpy")
def _add(lanes, tops, wide, norm):
    for row in range(_ROWS):
        part = wide[row * LANES : (row + 1) * LANES]
        if norm == SQUARES:
            for i in range(LANES):
                x = np.float64(part[i])
                lanes[i] += x * x
        elif norm == LARGEST:  # bits of magnitudes are in the order of the magnitudes, NaNs behind
            for i in range(LANES):
                tops[i] = max(tops[i], U(bits(part[i]) & _MAGNITUDE))
        else:
            for i in range(LANES):
                lanes[i] += np.float64(abs(part[i]))


@njit(nogil=True, error_model="numpy")
def _combined(lanes, tops, norm):
    if norm == LARGEST:
        top = tops[0]
        for i in range(1, LANES):
            top = max(top, tops[i])
        return np.float64(from_bits(U(top)))
    half = LANES // 2
    while half > 0:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@one_process_compiles
@njit(nogil=True, parallel=True, cache=True, error_model="numpy")
def _pass(found, source, dtype, n, norm, block, start):
    """Write one partial for each block to ``found``."""
    first = start // block
    for number in prange(found.size):
        wide = np.empty(_PIECE, np.float32)
        lanes, tops = np.zeros(LANES, np.float64), np.zeros(LANES, np.uint32)
        begin = (first + number) * block - start
        for piece in range(begin, begin + block, _PIECE):
            a, z = max(piece, 0), min(piece + min(_PIECE, begin + block - piece), n)
            if a < z:
                if z - a < _PIECE:
                    wide[:] = _ZERO
                part = wide[a - piece : z - piece]
                widen(part, source, dtype, a, z - a)
                _add(lanes, tops, wide, norm)
        found[number] = _combined(lanes, tops, norm)


def partials(x: Tensor, norm: int, block: int, start: int) -> Tensor:
    found = torch.empty(touched(x.numel(), block, start), dtype=torch.float64)
    with torch_threads():
        _pass(found.numpy(), as_bytes(x), DTYPES[x.dtype], x.numel(), norm, block, start)
    return found


def write(source: Tensor, out: Tensor, add: bool) -> None:
    reference.write(source, out, add)  # torch's own is as fast as the memory here
