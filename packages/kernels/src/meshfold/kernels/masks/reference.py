"""Dropout by global element in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels.random_bits import bits_of, plain, top24
from meshfold.kernels.rows import compute_dtype


def dropout(
    x: Tensor,
    threshold: int,
    scale: float,
    state: int | Tensor,
    rows: int | Tensor,
    col_offset: int,
    global_cols: int,
) -> Tensor:
    """Differentiable."""
    keep = kept(x.shape[0], x.shape[1], threshold, state, rows, col_offset, global_cols, x.device)
    return scaled(x, keep, scale)


def kept(
    count: int,
    columns: int,
    threshold: int,
    state: int | Tensor,
    rows: int | Tensor,
    col_offset: int,
    global_cols: int,
    device: torch.device,
) -> Tensor:
    """The mask ``count columns``, bool."""
    row = rows if isinstance(rows, Tensor) else plain(torch.arange(count, device=device)) + rows
    column = plain(torch.arange(columns, device=device)) + col_offset
    index = (row * global_cols).unsqueeze(1) + column
    return top24(bits_of(state, index)) >= threshold


def scaled(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """x * scale where kept, else 0 (also for an infinite or NaN x)."""
    wide = x.to(compute_dtype(x)) * scale
    return torch.where(keep, wide, 0.0).to(x.dtype)
