"""Small things that all kernels share: tensors as rows, and the precision they compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a kernel computes in: float64 for float64, else float32, rounded once at the output.

    Raises:
        TypeError: for a tensor that is not of floating point.
    """
    if x.dtype is torch.float64:
        return torch.float64
    if not x.dtype.is_floating_point:
        raise TypeError(f"kernels take floating-point tensors; this one is {x.dtype}: convert it first")
    return torch.float32


def as_rows(x: Tensor) -> Tensor:
    """``... c -> (...) c`` with neighbouring columns side by side in memory: a view where that is possible."""
    if x.ndim == 0:
        raise ValueError("kernels work on rows; a tensor without dims has none: give it at least one dim")
    rows = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


def check_vector(name: str, vector: Tensor | None, size: int) -> None:
    """Raise ValueError unless ``vector`` is None or has shape ``[size]``."""
    if vector is not None and vector.shape != (size,):
        raise ValueError(
            f"{name} has shape {list(vector.shape)}, but the rows are {size} elements wide: give it shape [{size}]"
        )


def check_alike(name: str, x: Tensor, y: Tensor) -> None:
    """Raise ValueError unless both have the same shape."""
    if x.shape != y.shape:
        raise ValueError(f"{name} must have equal shapes, got {list(x.shape)} and {list(y.shape)}")
