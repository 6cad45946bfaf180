"""Products with a weight that was cast to fp8 before: differentiable, and with a weight gradient that may wait.

The weight itself is an argument only so that autograd sends its gradient there. Its operands are arguments of their own, which a
compiled graph takes as inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import Fp8Operands, Fp8Recipe, Fp8Source, Fp8Tensor, fp8_operand
from meshfold.mesh.collectives import non_view_result
from meshfold.mesh.parameters import defer_weight_grad
from meshfold.tensor_parallel.matmul import lead_shape

Forward = Callable[[Tensor, Fp8Tensor, Tensor], tuple[Tensor, Fp8Source | None]]
"""From x ``m k``, the operand ``n k`` and the weight or its values to y ``m n``, local, and what made x."""
Backward = Callable[
    [Tensor, Fp8Tensor, Tensor, tuple[bool, bool], Fp8Source | None], tuple[Tensor | None, Tensor | None]
]
"""From x, the operand ``k n``, dy, which are wanted, and what made x to dx and dw."""


@dataclass(frozen=True, kw_only=True)
class Fp8CastProducts:
    """The products ``.. k -> .. n`` of one plan and recipe.

    Attributes:
        product: of an input, a weight and its operands.
        deferred: of an input, the operands, and a ticket (:mod:`meshfold.mesh.parameters.deferred_wgrad`).
    """

    product: Callable[[Tensor, Tensor, Fp8Operands], Tensor]
    deferred: Callable[[Tensor, Fp8Operands, Tensor], Tensor]


def bind_fp8_cast_products(recipe: Fp8Recipe, forward: Forward, backward: Backward) -> Fp8CastProducts:
    """Bind the products that two functions compute; torch.compile can trace them."""

    class CastMatmul(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, w: Tensor, values: Tensor, inverse: Tensor, turned: Tensor, turned_inverse: Tensor
        ) -> Tensor:
            ctx.save_for_backward(x, turned, turned_inverse)
            y, ctx.source = forward(x, fp8_operand(values, inverse, recipe), w)
            return non_view_result(y, x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, turned, turned_inverse = ctx.saved_tensors
            wants = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
            dx, dw = backward(x, fp8_operand(turned, turned_inverse, recipe, behind=dy), dy, wants, ctx.source)
            return dx, dw, None, None, None, None

    class DeferredCastMatmul(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, values: Tensor, inverse: Tensor, turned: Tensor, turned_inverse: Tensor, ticket: Tensor
        ) -> Tensor:
            ctx.save_for_backward(x, turned, turned_inverse, ticket)
            y, _ = forward(x, fp8_operand(values, inverse, recipe), values)
            return non_view_result(y, x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, turned, turned_inverse, ticket = ctx.saved_tensors
            dx = None
            if ctx.needs_input_grad[0]:
                dx, _ = backward(x, fp8_operand(turned, turned_inverse, recipe, behind=dy), dy, (True, False), None)
            return dx, None, None, None, None, defer_weight_grad(ticket, x, dy)

    def product(x: Tensor, w: Tensor, operands: Fp8Operands) -> Tensor:
        values, inverse, turned, turned_inverse = operands
        y: Tensor = CastMatmul.apply(x.reshape(-1, x.shape[-1]), w, values, inverse, turned, turned_inverse)
        return y.view(*lead_shape(x.shape[:-1], y.shape[0]), y.shape[-1])

    def deferred(x: Tensor, operands: Fp8Operands, ticket: Tensor) -> Tensor:
        values, inverse, turned, turned_inverse = operands
        y: Tensor = DeferredCastMatmul.apply(
            x.reshape(-1, x.shape[-1]), values, inverse, turned, turned_inverse, ticket
        )
        return y.view(*lead_shape(x.shape[:-1], y.shape[0]), y.shape[-1])

    return Fp8CastProducts(product=product, deferred=deferred)
