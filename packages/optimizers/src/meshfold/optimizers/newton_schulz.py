"""Newton-Schulz iteration: turn a matrix into the nearest semi-orthogonal one, only by products (Jordan et al. 2024, Muon)."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic a·x + b·x³ + c·x⁵: singular values come near 1 in few steps."""
_LONG = 3
"""Ratio of length to width from which products use Gram matrices: at 4, 30 instead of 45 times the smaller size cubed."""
_RESTART = 2
"""Steps on Gram matrices before the matrix is multiplied out: rounding in bfloat16 would grow."""


def orthogonalize(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return U Vᵀ of each matrix U Σ Vᵀ, nearly: in five steps singular values are within [0.7, 1.2].

    A step multiplies the matrix by a polynomial of its Gram matrix. If one side is at least three times as long as the other, the
    polynomials of the steps are multiplied first, since the Gram matrix is smaller. The next Gram matrix is Q G Q.

    Args:
        matrices: of shape ``(m, n)`` or ``(batch, m, n)``.
        steps: iterations.
        coefficients: of x, x³ and x⁵ in each.
        eps: the least norm that a matrix is divided by.
        dtype: in which products are made; None: that of the matrices.

    Returns:
        Matrices of the same shape, in ``dtype``.
    """
    x = matrices if dtype is None else matrices.to(dtype)
    single = x.dim() == 2
    x = x.unsqueeze(0) if single else x
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide).clamp(min=eps)
    x = (x / norms).to(x.dtype)
    small, large = sorted(x.shape[-2:])
    x = _by_gram_matrices(x, steps, coefficients) if large >= _LONG * small else _by_steps(x, steps, coefficients)
    return x.squeeze(0) if single else x


def _by_steps(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        gram = _gram(x)
        x = _multiplied(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), a)
    return x


def _by_gram_matrices(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    a, b, c = coefficients
    done = 0
    while done < steps:
        gram, product = _gram(x), None
        run = min(_RESTART if done == 0 else steps, steps - done)
        for left in reversed(range(run)):
            factor = torch.baddbmm(
                gram, gram, gram, beta=b, alpha=c
            )  # and a on the diagonal, which is not added: it would round
            if product is None:
                product = factor.clone()
                product.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                product = torch.baddbmm(product, factor, product, beta=a)
            if left:
                half = torch.baddbmm(gram, factor, gram, beta=a)
                gram = torch.baddbmm(half, half, factor, beta=a)
        assert product is not None  # there is one step at least
        x = _multiplied(x, product, 0.0)
        done += run
    return x


def _gram(x: Tensor) -> Tensor:
    """Return the smaller Gram matrix."""
    return torch.bmm(x.mT, x) if x.size(-2) > x.size(-1) else torch.bmm(x, x.mT)


def _multiplied(x: Tensor, factor: Tensor, kept: float) -> Tensor:
    """Return ``kept · x`` plus the product with a symmetric matrix on the smaller side."""
    pair = (x, factor) if x.size(-2) > x.size(-1) else (factor, x)
    return torch.baddbmm(x, *pair, beta=kept) if kept else torch.bmm(*pair)
