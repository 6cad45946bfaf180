"""Logits of a router with the accuracy of float32 products, at the speed of bfloat16 ones.

The product of two bfloat16 numbers is exact in float32. A matmul of bfloat16 operands that accumulates in float32 and returns
float32 is therefore as accurate as one in float32. In backward each gradient of a logit is split into two bfloat16 numbers, which
together have 16 bits of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels import on_gpu, once_differentiable


def router_logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply tokens by a router's weight: ``[n, h], [e, h] -> [n, h], [n, e]``: the tokens and their logits.

    Logits are in float32, or float64 where an operand is. Gradients have the dtypes of their tensors.

    Returns:
        x for the experts to read, and the logits. If experts read this x, backward adds the logits' gradient to theirs inside of a
        product. If they read the x that was given, it is a pass of its own over both.
    """
    if x.dtype is torch.bfloat16 and weight.dtype is torch.bfloat16 and not torch.compiler.is_compiling():
        tokens, logits = _Logits.apply(x, weight)
        return tokens, logits
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x, F.linear(x.to(dtype), weight.to(dtype))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return x.view_as(x), _product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtokens: Tensor | None, dlogits: Tensor | None) -> Any:
        if dlogits is None:
            return dtokens, None
        x, weight = ctx.saved_tensors
        both = x.new_empty(dlogits.shape[0], 2 * dlogits.shape[1])
        high, low = both.chunk(2, 1)
        torch.sub(dlogits, high.copy_(dlogits), out=low)
        dx = _added(dtokens, both, torch.cat([weight, weight])) if ctx.needs_input_grad[0] else None
        dweight = (
            _product(both.t(), x).unflatten(0, (2, -1)).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        return dx, dweight


def _added(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return ``total + a @ b``, in ``total`` where nobody else reads it: sums of experts' rows are made for this alone."""
    if total is None:
        return a @ b
    return total.addmm_(a, b) if total.is_contiguous() and total._base is None else total.addmm(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of matrices in bfloat16, in float32 and not rounded."""
    return torch.mm(a, b, out_dtype=torch.float32) if on_gpu(a) else torch.mm(a.float(), b.float())
