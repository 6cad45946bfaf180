"""Newton-Schulz iteration: a matrix to its nearest semi-orthogonal one, by products alone (Jordan et al. 2024, Muon)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic a·x + b·x³ + c·x⁵: singular values come near 1 in few steps."""


def orthogonalize(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return U Vᵀ of each matrix U Σ Vᵀ, nearly: in five steps singular values are within [0.7, 1.2].

    Args:
        matrices: of shape ``(m, n)`` or ``(batch, m, n)``.
        steps: iterations.
        coefficients: of x, x³ and x⁵ in each.
        eps: the least norm that a matrix is divided by.
        dtype: in which products are made; None: that of the matrices.

    Returns:
        Matrices of the same shape, in ``dtype``.
    """
    a, b, c = coefficients
    x = matrices if dtype is None else matrices.to(dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # the smaller Gram matrix
    single = x.dim() == 2
    x = x.unsqueeze(0) if single else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        powers = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, powers, x, beta=a)
    x = x.squeeze(0) if single else x
    return x.mT if tall else x
