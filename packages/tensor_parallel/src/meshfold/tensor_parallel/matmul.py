"""The sharded matmul as one differentiable operation, and collectives of a plan without the matmul.

An embedding looks rows up instead of multiplying, and several linear layers share one gathered input: they use the collectives
of the plan, differentiably.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from meshfold.kernels import applied, once_differentiable
from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.collectives import Primitive, adjoint_pair, non_view_result, traceable_result
from meshfold.mesh.parameters import defer_weight_grad
from meshfold.tensor_parallel.lowerings import Lowering, find_lowering
from meshfold.tensor_parallel.lowerings.gather import Gather, Moves, bind_gather
from meshfold.tensor_parallel.plan import MatmulPlan


def matmul(
    x: Tensor,
    w: Tensor,
    plan: MatmulPlan,
    mesh: Mesh,
    *,
    lowering: str = "gather",
    keep: frozenset[str] = frozenset(),
) -> Tensor:
    """Compute ``y = x wᵀ`` on local blocks, forward and backward as the plan says.

    Args:
        x: ``.. k``, this rank's block of layout ``plan.x``; all dims but the last together are m.
        w: ``n k``, this rank's block of layout ``plan.w``, stored as in ``nn.Linear``.
        plan: from :func:`meshfold.tensor_parallel.plan`.
        mesh: where the blocks lie.
        lowering: how to execute it (:mod:`meshfold.tensor_parallel.lowerings`).
        keep: gathered operands that forward keeps for backward (``{"x", "w"}`` or fewer): less traffic, more memory.

    Returns:
        ``.. n``, this rank's block of layout ``plan.y``. If m is longer or shorter than in x, the first dim
        absorbs it.

    Raises:
        LayoutError: if the lowering does not apply to the plan.
    """
    return bind_matmul(plan, mesh, lowering=lowering, keep=keep)(x, w)


class Product(Protocol):
    """A matmul that is bound to its plan and mesh."""

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """Return ``.. n`` for ``x .. k`` and ``w [n, k]``; a bias ``n`` only if :func:`adds_bias` says so."""
        ...


def bind_matmul(
    plan: MatmulPlan, mesh: Mesh, *, lowering: str = "gather", keep: frozenset[str] = frozenset()
) -> Product:
    """Bind :func:`matmul` to its plan and mesh: layers keep and call the result, and torch.compile can trace it.

    Raises:
        LayoutError: if the lowering does not apply to the plan.
    """
    chosen = find_lowering(lowering, plan)
    plan.prepare(mesh)
    chosen.prepare(plan, mesh)
    if lowering == "gather" and on_one_rank(plan, mesh):
        return functional.linear  # fewer launches: they dominate a small model's step
    return mesh.once(("matmul", plan, lowering, keep), lambda: _make_product(plan, mesh, chosen, keep))


def adds_bias(plan: MatmulPlan, mesh: Mesh, lowering: str) -> bool:
    """Return True if the product of :func:`bind_matmul` takes a bias, whose columns are those of this rank's y.

    Partial sums that ranks add up get it on the first of them alone. The bias's gradient is summed over this rank's tokens.
    """
    return lowering == "gather" and (on_one_rank(plan, mesh) or bind_gather(plan, mesh).takes_bias)


def bind_product(plan: MatmulPlan, mesh: Mesh, lowering: Lowering) -> Product:
    """Bind a matmul that a lowering of no name carries out, as :func:`bind_matmul` binds one by name."""
    plan.prepare(mesh)
    return mesh.once(("product", plan, lowering), lambda: _make_product(plan, mesh, lowering, frozenset()))


DeferredProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


def bind_deferred_matmul(plan: MatmulPlan, mesh: Mesh, *, lowering: str | Lowering = "gather") -> DeferredProduct:
    """Bind the matmul of a weight hidden from autograd: a function from (x, detached w, ticket) to y.

    Backward computes dx and passes x and dy, both at rest, to :func:`.deferred_wgrad.defer_weight_grad`; operands that both
    gradients need are gathered for each.
    """
    chosen = find_lowering(lowering, plan) if isinstance(lowering, str) else lowering
    return mesh.once(("deferred matmul", plan, lowering), lambda: _make_deferred_product(plan, mesh, chosen))


def weight_gradient(
    plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, dy: Tensor, *, lowering: str | Lowering = "gather"
) -> Tensor:
    """Compute a deferred weight gradient: ``m k`` and ``m n`` at rest to ``n k`` at rest. ``w`` gives the shape."""
    chosen = find_lowering(lowering, plan) if isinstance(lowering, str) else lowering
    _, dw = chosen.backward(plan, mesh, x, w, dy, wants=(False, True), kept=(None, None))
    if dw is None:
        raise LayoutError(f"lowering {lowering!r} makes no weight gradient by itself")
    return dw


def _make_deferred_product(plan: MatmulPlan, mesh: Mesh, chosen: Lowering) -> DeferredProduct:
    class DeferredMatmul(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, ticket: Tensor) -> Tensor:
            y, _, _ = chosen.forward(plan, mesh, x, w, frozenset())
            ctx.save_for_backward(x, w, ticket)
            return non_view_result(y, x)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, w, ticket = ctx.saved_tensors
            dx = None
            if ctx.needs_input_grad[0]:
                dx, _ = chosen.backward(plan, mesh, x, w, dy, wants=(True, False), kept=(None, None))
            return dx, None, defer_weight_grad(ticket, x, dy)

    def product(x: Tensor, w: Tensor, ticket: Tensor) -> Tensor:
        y: Tensor = DeferredMatmul.apply(x.reshape(-1, x.shape[-1]), w, ticket)
        return y.view(*lead_shape(x.shape[:-1], y.shape[0]), y.shape[-1])

    return product


def on_one_rank(plan: MatmulPlan, mesh: Mesh) -> bool:
    """Return True if a plan has axes and all of them have one rank: nothing is split, so nothing is sent."""
    axes = {axis for layout in (plan.x, plan.w, plan.y) for axis in layout.axes}
    return bool(axes) and mesh.size(*axes) == 1


def _make_product(plan: MatmulPlan, mesh: Mesh, chosen: Lowering, keep: frozenset[str]) -> Product:
    bound = bind_gather(plan, mesh)
    if type(chosen) is Gather:
        forward, backward = bound.forward, bound.backward
    else:
        forward, backward = partial(chosen.forward, plan, mesh), partial(chosen.backward, plan, mesh)

    class Matmul(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            y, x_whole, w_whole = forward(rows, w, keep) if bias is None else bound.forward(rows, w, keep, bias)
            if keep:
                kept = [whole for whole in (x_whole, w_whole) if whole is not None]
                ctx.save_for_backward(x, w, *kept)
            else:
                ctx.save_for_backward(x, w)
            if rows is x:
                return non_view_result(y, x)
            lead = x.shape[:-1]
            return _of_shape(y, (*(lead if y.shape[0] == rows.shape[0] else lead_shape(lead, y.shape[0])), y.shape[1]))

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> Any:
            saved, wants = ctx.saved_tensors, ctx.needs_input_grad
            x, w = saved[0], saved[1]
            # By index from both ends: torch.compile cannot always trace a starred assignment.
            kept = saved[2] if "x" in keep else None, saved[-1] if "w" in keep else None
            if x.dim() == 2:
                dx, dw = backward(x, w, dy, wants=(wants[0], wants[1]), kept=kept)
            else:
                dy = dy.reshape(-1, dy.shape[-1])
                dx, dw = backward(x.reshape(-1, x.shape[-1]), w, dy, wants=(wants[0], wants[1]), kept=kept)
                dx = None if dx is None else dx.view(x.shape)
            return dx, dw, dy.sum(0) if wants[2] else None

    apply = applied(Matmul)

    def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = apply(x, w, bias)
        return y

    return product


def _of_shape(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return what a Function has made in another shape, for it to return: never a view, see :func:`non_view_result`."""
    if torch.compiler.is_compiling():
        return traceable_result(y.view(shape))
    found: Tensor = torch.ops.aten._unsafe_view(y, shape)
    return found


def lead_shape(lead: torch.Size, rows: int) -> tuple[int, ...]:
    """Fold rows into the shape of the dims before the last; the first dim absorbs the change.

    Raises:
        LayoutError: if rows do not fill the dims after the first.
    """
    if len(lead) <= 1:
        return (rows,) * len(lead)
    inner = lead[1:].numel()
    if rows % inner:
        blocks = lead.numel() // math.gcd(rows, lead.numel())
        raise LayoutError(
            f"the {lead[0]} × {inner} tokens of this rank are split into {blocks} blocks by their first dim, and {lead[0]} does "
            f"not divide by {blocks}. A batch is padded to a multiple, a sequence is not: put the batch first "
            f"(batch_first=True), or give sequences of a multiple of {blocks} tokens, or use mode '1d'"
        )
    return (rows // inner, *lead[1:])


def bind_enter_operand(plan: MatmulPlan, mesh: Mesh, operand: Literal["x", "w"]) -> Primitive:
    """Bind the gather of x or w over its extras; backward scatters and sums the gradient as dx or dw leaves.

    The result takes a tensor of two dims, local at rest: ``[m, k]`` for x, ``[n, k]`` for w.
    """
    plan.prepare(mesh)

    def make() -> Primitive:
        moves = Moves(plan, mesh, operand)
        return adjoint_pair(moves.gather, moves.leave)

    return mesh.once(("enter operand", plan, operand), make)


def bind_leave_operand(plan: MatmulPlan, mesh: Mesh) -> Primitive:
    """Bind the scatter and sum of y, ``[m, n]`` partial sums to local at rest; backward gathers dy."""
    plan.prepare(mesh)

    def make() -> Primitive:
        moves = Moves(plan, mesh, "y")
        return adjoint_pair(moves.leave, moves.gather)

    return mesh.once(("leave operand", plan), make)
