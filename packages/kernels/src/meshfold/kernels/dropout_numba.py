"""Dropout by global element on the CPU: numba finds the mask in one pass where torch takes some twenty."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from meshfold.kernels._numba import bits_at, one_process_compiles
from meshfold.kernels.dropout import scaled

_TO_24 = np.uint64(40)


@one_process_compiles
@njit(cache=True, nogil=True)
def _fill_kept(keep, rows, state, threshold, col_offset, global_cols):
    for r in range(keep.shape[0]):
        first = rows[r] * global_cols + col_offset
        for c in range(keep.shape[1]):
            keep[r, c] = (bits_at(state, first + np.uint64(c)) >> _TO_24) >= threshold


def drop(
    x: Tensor,
    threshold: int,
    scale: float,
    state: int | Tensor,
    rows: int | Tensor,
    col_offset: int,
    global_cols: int,
) -> Tensor:
    row = rows if isinstance(rows, Tensor) else torch.arange(rows, rows + x.shape[0])
    keep = torch.empty(x.shape, dtype=torch.bool)
    _fill_kept(
        keep.numpy(),
        row.contiguous().numpy().view(np.uint64),
        np.uint64(int(state) & 0xFFFFFFFFFFFFFFFF),
        np.uint64(threshold),
        np.uint64(col_offset),
        np.uint64(global_cols),
    )
    return scaled(x, keep, scale)
