"""Rows as bytes: the float8 numbers (e4m3) of each row, followed by its scale."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels import to_fp8

_SCALE = 4
"""bytes of a scale in float32"""


def pack(x: Tensor) -> Tensor:
    """Return the bytes of rows: ``[m, h] -> [m, h + 4]``, each row scaled by a power of 2 so that its largest number fits."""
    found = to_fp8(x, rows=True)
    scales = found.inverse.reshape(-1, 1).float().contiguous()
    return torch.cat([found.values.view(torch.uint8), scales.view(torch.uint8)], 1)


def unpack(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of :func:`pack`: ``[m, h + 4] -> [m, h]``.

    The relative error is at most 1/16. Numbers below 2⁻¹⁴ of the row's largest are off by at most 2⁻¹⁷ of the largest.
    """
    hidden = message.shape[1] - _SCALE
    # Copies: a single row counts as contiguous, however its bytes are aligned.
    values = message[:, :hidden].clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn)
    scales = message[:, hidden:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (values.float() * scales).to(dtype)
