"""Casts to fp8 (e4m3) with a scale for each row, a power of 2: of a matrix, and of its transpose.

    scale    = 2**floor(log2(448 / amax))           amax: the largest magnitude of a row; at least 1e-30
    values   = round(clamp(x * scale, -448, 448))   to nearest, ties to even; the product is exact
    inverse  = 1 / scale                            nan for a row with nan or infinity, whose values are nan, too

In Triton a cast reads the matrix once, or twice for the transpose, whose rows run across memory, and writes one byte an element.
The reference makes several passes over memory. Both give the same bits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from meshfold.kernels import dispatch

E4M3_LARGEST = 448.0
LEAST_AMAX = 1e-30  # its scale and the reciprocal are normal float32 numbers
POWER_BITS = 0x7F800000  # exponent of a float32


def power_scale(amax: Tensor, largest: float) -> Tensor:
    """Return the power of 2 that brings an amax next to the largest number of a format, in float32; nan for infinity and nan."""
    # In float64: compiled float32 division is inexact, and the eager and the compiled cast must agree.
    scale = (largest / amax.double().clamp(min=LEAST_AMAX)).float()
    scale = (scale.view(torch.int32) & POWER_BITS).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan)


def cast_matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast ``r c``, in any layout of memory, with a scale for each row: values ``r c``, row-major, and inverses ``r 1``."""
    if x.stride(1) != 1 and x.stride(0) == 1:
        return dispatch.twin(cast_columns, x)(x.t())
    return dispatch.twin(cast_rows, x)(x)


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast ``r c`` with a scale for each row: values ``r c`` in e4m3, and the inverse of the scales, float32 ``r 1``."""
    scale = power_scale(x.abs().amax(dim=1, keepdim=True).float(), E4M3_LARGEST)
    scaled = (x.float() * scale).clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return scaled.to(torch.float8_e4m3fn).contiguous(), scale.reciprocal()


def cast_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast the transpose of ``r c`` with a scale for each of its rows: values ``c r``, row-major, and inverses ``c 1``."""
    return cast_rows(x.t())


def cast_scaled(x: Tensor, scale: Tensor, out: Tensor, along: Literal["rows", "columns", "none"]) -> None:
    """Cast ``r c``, row-major, with given scales: one for each row or each column, or one for all.

    Args:
        x: floating point.
        scale: float32, ``r``, ``c`` or ``1``.
        out: e4m3, ``r c``, row-major: is written.
        along: what has a scale of its own.
    """
    each = {"rows": scale.view(-1, 1), "columns": scale.view(1, -1), "none": scale}[along]
    out.copy_((x.float() * each).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn))


def turn(values: Tensor, inverse: Tensor) -> Tensor:
    """Return the transpose ``c r`` of 8-bit values ``r c``, row-major. ``inverse``, their scales, chooses the implementation."""
    return values.t().contiguous()
