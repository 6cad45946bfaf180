"""All of a mixture's experts as one operation: tokens in, weighted sums out, some products fused with their neighbours.

By grouped products alone a layer copies tokens to rows, multiplies, activates, multiplies and sums; backward copies the gradients
to rows too. A :class:`ProductPlan` says which of these passes over memory are left out, because a Triton product of
:mod:`meshfold.kernels` does their work on its way:

    gate_up     gathers tokens, or reads their rows, and ends with the weighted activation
    back        gathers the gradients of the sums, and ends with the gradient of the activation
    gate_up's gradient gathers tokens again, and down's gathers the gradients of the sums
    down, tokens' gradient: plain products, of other tiles than torch's

The rows of tokens, or of gradients, are copied only if a product reads them, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.experts.grouped import product_of_runs
from meshfold.kernels import (
    ProductTile,
    gated_row_gradients,
    gated_rows,
    outer_rows,
    rows_times,
    sum_rows,
    take_rows,
    weighted_swiglu,
    weighted_swiglu_backward,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductPlan:
    """The tile of each fused product; None for torch's grouped one and the operations beside it.

    Attributes:
        gate_up: the first product, with the activation.
        gate_up_gathers: it gathers tokens; otherwise it reads their rows.
        back: the gradient of the activation's input.
        back_gathers: it gathers gradients; otherwise it reads their rows.
        gate_up_gradient: of the parameter; gathers tokens.
        down_gradient: of the parameter; gathers gradients.
        down: the second product.
        token_gradient: of the rows of tokens.
    """

    gate_up: ProductTile | None = None
    gate_up_gathers: bool = False
    back: ProductTile | None = None
    back_gathers: bool = False
    gate_up_gradient: ProductTile | None = None
    down_gradient: ProductTile | None = None
    down: ProductTile | None = None
    token_gradient: ProductTile | None = None

    @property
    def needs_rows_of_tokens(self) -> bool:
        """True if forward copies tokens to rows."""
        return self.gate_up is None or not self.gate_up_gathers

    @property
    def needs_rows_of_gradients(self) -> bool:
        """True if backward copies the gradients of the sums to rows."""
        return self.back is None or not self.back_gathers or self.down_gradient is None


def fused_experts(
    tokens: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    places: Tensor,
    pairs: Tensor,
    ends: Tensor,
    plan: ProductPlan,
) -> Tensor:
    """Return the weighted sum of each token's experts: ``[n, h] -> [n, h]``.

    Args:
        tokens: [n, h].
        weights: [n, k].
        gate_up: [e, 2·f, h], the gate's rows first.
        down: [e, h, f].
        places, pairs, ends: of :func:`meshfold.kernels.expert_places`.
        plan: which products are fused.
    """
    y: Tensor = _Experts.apply(tokens, weights, gate_up, down, places, pairs, ends, plan)
    return y


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        places: Tensor,
        pairs: Tensor,
        ends: Tensor,
        plan: ProductPlan,
    ) -> Tensor:
        tokens, gate_up, down = tokens.contiguous(), gate_up.contiguous(), down.contiguous()
        sources = (pairs // places.shape[1]).to(torch.int32)
        of_rows = take_rows(weights.reshape(-1, 1), pairs, places.reshape(-1, 1)).squeeze(1)
        rows = take_rows(tokens, pairs, places) if plan.needs_rows_of_tokens else None
        if plan.gate_up is None:
            assert rows is not None
            both = product_of_runs(rows, gate_up.transpose(1, 2), ends, None)
            hidden = weighted_swiglu(both, of_rows, ends[-1:])
        elif rows is None:
            both, hidden = gated_rows(tokens, sources, gate_up, ends, of_rows, plan.gate_up)
        else:
            both, hidden = gated_rows(rows, None, gate_up, ends, of_rows, plan.gate_up)
        outputs = _times(hidden, down.transpose(1, 2), ends, plan.down)
        if plan.gate_up_gradient is not None:
            rows = None
        ctx.save_for_backward(
            tokens,
            of_rows,
            gate_up,
            down,
            places,
            pairs,
            ends,
            sources,
            both,
            hidden,
            *(() if rows is None else (rows,)),
        )
        ctx.plan, ctx.dtype = plan, weights.dtype
        return sum_rows(outputs, pairs, places)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        tokens, of_rows, gate_up, down, places, pairs, ends, sources, both, hidden, *kept = ctx.saved_tensors
        plan: ProductPlan = ctx.plan
        needs_tokens, needs_weights, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        dy = dy.contiguous()
        dy_rows = take_rows(dy, pairs, places) if plan.needs_rows_of_gradients else None
        dtokens = dweights = dgate_up = ddown = None
        if needs_down:
            if plan.down_gradient is not None:
                ddown = outer_rows(dy, sources, hidden, None, ends, plan.down_gradient)
            else:
                assert dy_rows is not None
                ddown = product_of_runs(dy_rows.t(), hidden, ends, None)
        del hidden
        if plan.back is None:
            assert dy_rows is not None
            dhidden = product_of_runs(dy_rows, down, ends, None)
            dboth, of_weights = weighted_swiglu_backward(dhidden, both, of_rows, ends[-1:])
            del dhidden
        elif plan.back_gathers:
            dboth, of_weights = gated_row_gradients(dy, sources, down, ends, both, of_rows, plan.back)
        else:
            assert dy_rows is not None
            dboth, of_weights = gated_row_gradients(dy_rows, None, down, ends, both, of_rows, plan.back)
        del dy_rows, both
        if needs_weights:
            dweights = sum_rows(of_weights.unsqueeze(1), pairs, places.reshape(-1, 1))
            dweights = dweights.view(places.shape).to(ctx.dtype)
        if needs_tokens:
            dtokens = sum_rows(_times(dboth, gate_up, ends, plan.token_gradient), pairs, places)
        if needs_gate_up:
            if plan.gate_up_gradient is not None:
                dgate_up = outer_rows(dboth, None, tokens, sources, ends, plan.gate_up_gradient)
            else:
                rows = kept[0] if kept else take_rows(tokens, pairs, places)
                dgate_up = product_of_runs(dboth.t(), rows, ends, None)
        return dtokens, dweights, dgate_up, ddown, None, None, None, None


def _times(x: Tensor, matrix: Tensor, ends: Tensor, tile: ProductTile | None) -> Tensor:
    return product_of_runs(x, matrix, ends, None) if tile is None else rows_times(x, matrix, ends, tile)
