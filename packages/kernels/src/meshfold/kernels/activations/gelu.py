"""Bias + GELU with autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.activations import reference
from meshfold.kernels.activations.interface import ActivationKernels
from meshfold.kernels.rows import as_rows, check_vector

_reference: ActivationKernels = reference


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu(x + bias): ``... n, n -> ... n``, in the dtype of ``x``.

    Args:
        x: rows of n elements.
        bias: [n], or None for a plain GELU.
        approximate: ``"none"`` for the exact GELU (erf), ``"tanh"`` for its approximation; torch's words.

    Raises:
        ValueError: for another word, or if ``bias`` is not [n].
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}; it must be 'none' (exact) or 'tanh'")
    check_vector("bias", bias, x.shape[-1])
    tanh = approximate == "tanh"
    if torch.compiler.is_compiling():
        return reference.gelu(x, bias, tanh)
    y: Tensor = _BiasGelu.apply(x, bias, tanh)
    return y


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        ctx.kernels = dispatch.twin("activations", _reference, x)
        ctx.tanh = tanh
        ctx.save_for_backward(x, bias)
        y: Tensor = ctx.kernels.gelu(as_rows(x), bias, tanh)
        return y.reshape(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, bias = ctx.saved_tensors
        dx, dbias = ctx.kernels.gelu_gradients(as_rows(dy), as_rows(x), bias, ctx.tanh)
        return dx.reshape(x.shape), None if bias is None else dbias.to(bias.dtype), None
