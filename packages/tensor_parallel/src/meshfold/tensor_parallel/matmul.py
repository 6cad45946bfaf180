"""The sharded matmul as one differentiable operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import LayoutError, Mesh
from meshfold.tensor_parallel.algebra import MatmulPlan
from meshfold.tensor_parallel.lowerings import lowering as find_lowering


def matmul(
    x: Tensor,
    w: Tensor,
    plan: MatmulPlan,
    mesh: Mesh,
    *,
    lowering: str = "gather",
    keep: frozenset[str] = frozenset(),
) -> Tensor:
    """``y = x wᵀ`` on local blocks, forward and backward as the plan says.

    Args:
        x: ``.. k``, this rank's block of layout ``plan.x``; all dims but the last together are m.
        w: ``n k``, this rank's block of layout ``plan.w``, lying as ``nn.Linear`` keeps it.
        plan: from :func:`meshfold.tensor_parallel.plan`.
        mesh: where the blocks lie.
        lowering: how to carry it out (:mod:`meshfold.tensor_parallel.lowerings`).
        keep: gathered operands that forward keeps for backward (``{"x", "w"}`` or fewer): less traffic, more memory.

    Returns:
        ``.. n``, this rank's block of layout ``plan.y``. Where m is longer or shorter than in x, the first dim takes
        it up.

    Raises:
        LayoutError: if the lowering does not apply to the plan.
    """
    find_lowering(lowering, plan)
    y = _Matmul.apply(x.reshape(-1, x.shape[-1]), w, plan, mesh, lowering, keep)  # type: ignore[no-untyped-call]
    return y.view(*lead_shape(x.shape[:-1], y.shape[0]), y.shape[-1])  # type: ignore[no-any-return]


def lead_shape(lead: torch.Size, rows: int) -> tuple[int, ...]:
    """Fold so many rows into the shape of the dims before the last; the first dim takes up the change.

    Raises:
        LayoutError: if rows do not fill the dims after the first.
    """
    if len(lead) <= 1:
        return (rows,) * len(lead)
    inner = lead[1:].numel()
    if rows % inner:
        raise LayoutError(
            f"{rows} tokens of this rank are not whole sequences of {inner}: the batch must be a multiple of the blocks "
            f"that split it"
        )
    return (rows // inner, *lead[1:])


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, plan: MatmulPlan, mesh: Mesh, lowering: str, keep: frozenset[str]
    ) -> Tensor:
        y, x_whole, w_whole = find_lowering(lowering, plan).forward(plan, mesh, x, w, keep)
        ctx.save_for_backward(x, w, x_whole, w_whole)
        ctx.plan, ctx.mesh, ctx.lowering = plan, mesh, lowering
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, x_whole, w_whole = ctx.saved_tensors
        dx, dw = find_lowering(ctx.lowering, ctx.plan).backward(
            ctx.plan, ctx.mesh, x, w, dy, wants=ctx.needs_input_grad[:2], kept=(x_whole, w_whole)
        )
        return dx, dw, None, None, None, None
