"""Norms of whole rows, with autograd; the residual add fused in where asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.norms import reference
from meshfold.kernels.norms.interface import NormKernels
from meshfold.kernels.rows import as_rows, check_alike, check_vector

_reference: NormKernels = reference


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """RMSNorm of every row: ``... h, h -> ... h``.

    Args:
        x: rows of h elements.
        weight: [h], in any floating dtype, or None.
        eps: added to the mean square.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ValueError: if ``weight`` is not [h].
    """
    check_vector("weight", weight, x.shape[-1])
    if torch.compiler.is_compiling():
        return reference.rms_norm(x, weight, eps)
    y: Tensor = _Norm.apply(x, weight, None, eps, False)
    return y


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """LayerNorm of every row: ``... h, h, h -> ... h``.

    Args:
        x: rows of h elements.
        weight: [h] or None.
        bias: [h] or None.
        eps: added to the variance.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ValueError: if ``weight`` or ``bias`` is not [h].
    """
    check_vector("weight", weight, x.shape[-1])
    check_vector("bias", bias, x.shape[-1])
    if torch.compiler.is_compiling():
        return reference.layer_norm(x, weight, bias, eps)
    y: Tensor = _Norm.apply(x, weight, bias, eps, True)
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Residual add and RMSNorm in one pass: ``... h, ... h, h -> (... h, ... h)``.

    Args:
        x: a block's output, rows of h elements.
        residual: the residual stream, of the same shape; may be wider than ``x`` (float32 beside bfloat16).
        weight: [h] or None.
        eps: added to the mean square.

    Returns:
        (y, new_residual): new_residual is x + residual, rounded to the residual's dtype; y is the RMSNorm of
        new_residual as rounded, in the dtype of ``x``: the same as the two steps one after the other.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_alike("x and residual", x, residual)
    check_vector("weight", weight, x.shape[-1])
    if torch.compiler.is_compiling():
        summed = reference.add(x, residual)
        return reference.rms_norm(summed, weight, eps, x.dtype), summed
    y, summed = _AddNorm.apply(x, residual, weight, None, eps, False)
    return y, summed


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Residual add and LayerNorm in one pass; like :func:`add_rms_norm` otherwise."""
    check_alike("x and residual", x, residual)
    check_vector("weight", weight, x.shape[-1])
    check_vector("bias", bias, x.shape[-1])
    if torch.compiler.is_compiling():
        summed = reference.add(x, residual)
        return reference.layer_norm(summed, weight, bias, eps, x.dtype), summed
    y, summed = _AddNorm.apply(x, residual, weight, bias, eps, True)
    return y, summed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        ctx.kernels = dispatch.twin("norms", _reference, x)
        rows = as_rows(x)
        y, _, mean, rstd = ctx.kernels.whole(rows, None, weight, bias, eps, centred)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        whole: Tensor = y.reshape(x.shape)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, dweight, dbias = _gradients(ctx, dy, None)
        return dx, dweight, dbias, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.kernels = dispatch.twin("norms", _reference, x)
        y, summed, mean, rstd = ctx.kernels.whole(as_rows(x), as_rows(residual), weight, bias, eps, centred)
        y, summed = y.reshape(x.shape), summed.reshape(x.shape)
        ctx.save_for_backward(summed, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_dtype = x.dtype
        ctx.set_materialize_grads(False)
        return y, summed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dsummed: Tensor | None) -> Any:
        if dy is None:
            dx = dsummed
            dweight = dbias = None
        else:
            dx, dweight, dbias = _gradients(ctx, dy, dsummed)
        return None if dx is None else dx.to(ctx.x_dtype), dx, dweight, dbias, None, None


def _gradients(ctx: Any, dy: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = ctx.kernels.gradients(
        as_rows(dy),
        as_rows(x),
        weight,
        mean,
        rstd,
        None,
        x.shape[-1],
        None if added is None else as_rows(added),
        ctx.bias_dtype is not None,
    )
    return (
        dx.reshape(x.shape),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None else dbias.to(ctx.bias_dtype),
    )
