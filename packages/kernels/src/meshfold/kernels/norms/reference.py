"""Norms in plain torch: what every other implementation is tested against, and what runs on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels.rows import compute_dtype


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``... h``: x / sqrt(mean(x**2) + eps) * weight, differentiable, in ``dtype`` (that of x)."""
    wide = x.to(compute_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _affine(y, weight, None).to(dtype or x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """``... h``: (x - mean) / sqrt(variance + eps) * weight + bias, differentiable, in ``dtype`` (that of x)."""
    wide = x.to(compute_dtype(x))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return _affine(y, weight, bias).to(dtype or x.dtype)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def _centred(x: Tensor, mean: Tensor | None) -> Tensor:
    wide = x.to(compute_dtype(x))
    return wide if mean is None else wide - mean.unsqueeze(-1)


def row_sums(x: Tensor, mean: Tensor | None, square: bool) -> Tensor:
    centred = _centred(x, mean)
    return torch.linalg.vecdot(centred, centred) if square else centred.sum(-1)


def add(x: Tensor, residual: Tensor) -> Tensor:
    """x + residual, rounded once to the dtype of the residual."""
    dtype = compute_dtype(residual)
    return (x.to(dtype) + residual.to(dtype)).to(residual.dtype)


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> Tensor:
    return _affine(_centred(x, mean) * rstd.unsqueeze(-1), weight, bias).to(x.dtype)


def gradient_sums(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor) -> Tensor:
    normed = _centred(x, mean) * rstd.unsqueeze(-1)
    scaled = _affine(dy.to(normed.dtype), weight, None)
    along = torch.linalg.vecdot(scaled, normed)
    return along.unsqueeze(0) if mean is None else torch.stack((scaled.sum(-1), along))


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    sums: Tensor | None,
    hidden: int,
    added: Tensor | None,
    with_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # torch finds no gradient for a bias that stands alone.
    as_torch = mean is not None and sums is None and (weight is not None or not with_bias)
    if as_torch and mean is not None and _native(x, dy, weight, mean):
        dx, dweight, dbias = _native_gradients(dy, x, weight, mean, rstd, with_bias)
        return dx if added is None else dx + added, dweight, dbias
    rstd = rstd.unsqueeze(-1)
    normed = _centred(x, mean) * rstd
    wide = dy.to(normed.dtype)
    scaled = _affine(wide, weight, None)
    if sums is None:
        along = torch.linalg.vecdot(scaled, normed)
        sums = along.unsqueeze(0) if mean is None else torch.stack((scaled.sum(-1), along))
    towards = normed * (sums[-1] / hidden).unsqueeze(-1)
    if mean is not None:
        towards = towards + (sums[0] / hidden).unsqueeze(-1)
    dx = (scaled - towards) * rstd
    if added is not None:
        dx = dx + added.to(dx.dtype)
    dweight = None if weight is None else (wide * normed).sum(0)
    return dx.to(x.dtype), dweight, wide.sum(0) if with_bias else None


def whole(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    summed = x if residual is None else add(x, residual)
    hidden = x.shape[-1]
    if centred and _native(summed, x, weight, bias):
        y, means, rstd = torch.native_layer_norm(summed, (hidden,), weight, bias, eps)
        return y, summed, means.flatten(), rstd.flatten()
    mean = row_sums(summed, None, False) / hidden if centred else None
    rstd = torch.rsqrt(row_sums(summed, mean, True) / hidden + eps)
    y = _affine(_centred(summed, mean) * rstd.unsqueeze(-1), weight, bias)
    return y.to(x.dtype), summed, mean, rstd


def _native(x: Tensor, *others: Tensor | None) -> bool:
    """Whether torch's own LayerNorm computes this as we do: in one precision, with nothing to round on the way."""
    return x.dtype in (torch.float32, torch.float64) and all(t is None or t.dtype is x.dtype for t in others)


def _native_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, with_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    shape = (*x.shape[:-1], 1)
    wanted = [True, weight is not None, with_bias]
    # Of the bias torch reads no more than that it is there, which the weight can stand for.
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, (x.shape[-1],), mean.view(shape), rstd.view(shape), weight, weight, wanted
    )
    return dx, dweight if wanted[1] else None, dbias if with_bias else None
