"""The numba twin of the hash: the same bits as the torch reference."""

from __future__ import annotations

import numpy as np
from numba import njit

from meshfold.kernels.random_bits import GOLDEN, MIX_1, MIX_2

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


@njit(inline="always")
def bits_at(state, index):
    """bits = splitmix64(state + index * GOLDEN), all uint64."""
    z = state + index * _GOLDEN + _GOLDEN
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)
