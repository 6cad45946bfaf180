"""The two products of experts, each with the pass over rows before it, so that backward can run passes beside products.

- :func:`gathered_matmul`: tokens are copied to rows and multiplied. In backward the rows' gradients are summed into tokens beside
  the product for the weights' gradient.
- :func:`activated_matmul`: gate and up are activated, weighted and multiplied. In backward the gradients of gate and up are
  computed beside the product for the weights' gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.experts.beside import beside
from meshfold.experts.expert_rows import ExpertRows
from meshfold.experts.grouped import in_autocast, rows_times, weight_gradient
from meshfold.kernels import sum_rows, take_rows, weighted_swiglu, weighted_swiglu_gradients


def gathered_matmul(rows: ExpertRows, weight: Tensor) -> Tensor:
    """Copy tokens to the rows of their experts and multiply each row by its expert's matrix: ``[n, h], [e, h, b] -> [m, b]``."""
    tokens, weight = in_autocast(rows.tokens, weight)
    y: Tensor = _Gathered.apply(
        tokens, weight, rows.ends, rows.counts, rows.pairs, rows.places, rows.keeps or not tokens.requires_grad
    )
    return y


def activated_matmul(gate_up: Tensor, rows: ExpertRows, weight: Tensor) -> Tensor:
    """Return ``(silu(gate) * up * weight of the row)`` times the matrix of each row's expert: ``[m, 2 f], [e, f, b] -> [m, b]``.

    Args:
        gate_up: gate and up side by side.
        rows: has weights.
        weight: [e, f, b].
    """
    gate_up, weight = in_autocast(gate_up, weight)
    y: Tensor = _Activated.apply(gate_up, rows.weights, weight, rows.ends, rows.counts)
    return y


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        ends: Tensor,
        counts: Sequence[int] | None,
        pairs: Tensor,
        places: Tensor,
        keeps: bool,
    ) -> Tensor:
        x = take_rows(tokens, pairs, places)
        ctx.save_for_backward(x if keeps else tokens, weight, ends, pairs, places)
        ctx.counts, ctx.keeps = counts, keeps
        return rows_times(x, weight, ends, counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        kept, weight, ends, pairs, places = ctx.saved_tensors
        dy = dy.contiguous()
        needs_tokens, needs_weight = ctx.needs_input_grad[:2]
        nothing = (None,) * 5
        drows = rows_times(dy, weight.transpose(1, 2), ends, ctx.counts) if needs_tokens else None

        def to_weight() -> Tensor:
            x = kept if ctx.keeps else take_rows(kept, pairs, places)
            return weight_gradient(x, dy, weight, ends, ctx.counts)

        if drows is None:
            return None, to_weight() if needs_weight else None, *nothing
        if not needs_weight:
            return sum_rows(drows, pairs, places), None, *nothing
        dweight, dtokens = beside(to_weight, lambda: sum_rows(drows, pairs, places), dy)
        return dtokens, dweight, *nothing


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weights: Tensor, weight: Tensor, ends: Tensor, counts: Sequence[int] | None
    ) -> Tensor:
        hidden = weighted_swiglu(gate_up, weights, ends[-1:])
        ctx.save_for_backward(gate_up, weights, hidden, weight, ends)
        ctx.counts = counts
        return rows_times(hidden, weight, ends, counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate_up, weights, hidden, weight, ends = ctx.saved_tensors
        dy = dy.contiguous()
        needs_rows, needs_weight = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]

        def to_weight() -> Tensor:
            return weight_gradient(hidden, dy, weight, ends, ctx.counts)

        if not needs_rows:
            return None, None, to_weight() if needs_weight else None, None, None
        dhidden = rows_times(dy, weight.transpose(1, 2), ends, ctx.counts)
        dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)

        def to_rows() -> Tensor:
            return weighted_swiglu_gradients(dhidden, gate_up, weights, dgate_up, ends[-1:])

        if needs_weight:
            dweight, dweights = beside(to_weight, to_rows, dy)
        else:
            dweight, dweights = None, to_rows()
        return dgate_up, dweights, dweight, None, None
