"""Products of a linear layer in fp8 as steps of an autograd function: operands that products share are cast once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels.fp8 import (
    Fp8Maximum,
    Fp8Recipe,
    Fp8Tensor,
    fp8_gradient_casts,
    fp8_input_gradient,
    fp8_output,
    fp8_weight_gradient,
)
from meshfold.kernels.fp8_inputs import Fp8Source, shared_columns, shared_input


def fp8_forward(
    x: Tensor,
    w: Tensor | Fp8Tensor,
    recipe: Fp8Recipe,
    maximum: Fp8Maximum | None = None,
    *,
    weight: Tensor | None = None,
) -> tuple[Tensor, Fp8Source | None]:
    """Compute ``y = x wᵀ``, ``m k, n k -> m n``, with the cast of x that other products of this input have made.

    Args:
        x: the input.
        w: the weight, or its operand.
        recipe, maximum: of the product.
        weight: of the layer, if ``w`` is an operand or was gathered.

    Returns:
        y, and what made x, for :func:`fp8_backward`.
    """
    known = weight if weight is not None or isinstance(w, Fp8Tensor) else w
    if torch.compiler.is_compiling() or known is None:
        return fp8_output(x, w, recipe, maximum), None
    with shared_input(x, known, recipe, maximum) as (casts, source):
        return fp8_output(casts, w, recipe, maximum), source


def fp8_backward(
    dy: Tensor,
    x: Tensor,
    w: Tensor | Fp8Tensor,
    recipe: Fp8Recipe,
    maximum: Fp8Maximum | None = None,
    *,
    wants: tuple[bool, bool] = (True, True),
    source: Fp8Source | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute ``dx = dy w`` and ``dw = dyᵀ x`` as far as they are wanted, with casts that other products share.

    ``source``: of x, from :func:`fp8_forward`.
    """
    casts = fp8_gradient_casts(dy, recipe, maximum, wants=wants)
    dx = fp8_input_gradient(casts, w, recipe, maximum) if wants[0] else None
    if not wants[1]:
        return dx, None
    return dx, fp8_weight_gradient(casts, shared_columns(x, recipe, maximum, source), recipe, maximum)


def bind_fp8_matmul(recipe: Fp8Recipe, maximum: Fp8Maximum | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the differentiable product ``.. k, n k -> .. n`` of one recipe; torch.compile can trace it.

    ``maximum``: takes an amax over the ranks that hold the rest of the operands; None if there are none.
    """

    class Fp8Matmul(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            y, ctx.source = fp8_forward(x, w, recipe, maximum)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, w = ctx.saved_tensors
            wants = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
            return fp8_backward(dy, x, w, recipe, maximum, wants=wants, source=ctx.source)

    def product(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = Fp8Matmul.apply(x.reshape(-1, x.shape[-1]), w)
        return y.view(*x.shape[:-1], w.shape[0])

    return product
