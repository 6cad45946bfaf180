"""The gather lowering: all-gather the operands, multiply once, scatter the result.

    forward   y  = leave(gather(x) gather(w))
    dgrad     dx = leave(gather(dy) gather(w)ᵀ)
    wgrad     dw = leave(gather(x)ᵀ gather(dy))

Backward starts every gather at once and orders the products so that x travels under the dgrad product and dx under
the wgrad product. Gathered operands are not kept for backward unless asked: shards are all that a layer holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from meshfold.mesh import Mesh, Pending, collectives
from meshfold.tensor_parallel.cost import Cost, CostBuilder

if TYPE_CHECKING:
    from meshfold.tensor_parallel.algebra import MatmulPlan, Operand, Phase


class Gather:
    """All-gather, one matmul, reduce-scatter."""

    def refuses(self, plan: MatmulPlan) -> str:
        """Applies to every plan."""
        return ""

    def prepare(self, plan: MatmulPlan, mesh: Mesh) -> None:
        """The plan's own process groups are enough."""

    def forward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, keep: frozenset[str]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        coming_x, coming_w = start_gather(plan, mesh, "x", x), start_gather(plan, mesh, "w", w)
        x_whole, w_whole = coming_x.wait(), coming_w.wait()
        y = start_leave(plan, mesh, "y", x_whole @ w_whole.t()).wait()
        return y, x_whole if "x" in keep else None, w_whole if "w" in keep else None

    def backward(
        self,
        plan: MatmulPlan,
        mesh: Mesh,
        x: Tensor,
        w: Tensor,
        dy: Tensor,
        *,
        wants: tuple[bool, bool],
        kept: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor | None, Tensor | None]:
        want_dx, want_dw = wants
        coming_dy = start_gather(plan, mesh, "y", dy)
        coming_w = _kept_or_gather(plan, mesh, "w", w, kept[1]) if want_dx else None
        coming_x = _kept_or_gather(plan, mesh, "x", x, kept[0]) if want_dw else None
        dy_whole = coming_dy.wait()
        leaving_dx = leaving_dw = None
        if coming_w is not None:
            leaving_dx = start_leave(plan, mesh, "x", dy_whole @ coming_w.wait())
        if coming_x is not None:
            leaving_dw = start_leave(plan, mesh, "w", dy_whole.t() @ coming_x.wait())
        return (
            leaving_dx.wait() if leaving_dx is not None else None,
            leaving_dw.wait() if leaving_dw is not None else None,
        )

    def cost(
        self,
        plan: MatmulPlan,
        sizes: Mapping[str, int],
        mesh: Mesh,
        *,
        itemsize: int,
        phases: tuple[Phase, ...],
        keep: frozenset[str],
    ) -> Cost:
        cost = CostBuilder(mesh, itemsize)

        def local(operand: Operand) -> int:
            return math.prod(plan.local_sizes(operand, sizes, mesh).values())

        def gather(phase: Phase, operand: Operand, name: str) -> None:
            cost.gather(phase, name, [axis for _, axis in reversed(plan.extras(operand))], local(operand))

        def leave(phase: Phase, operand: Operand, name: str) -> None:
            axes = [axis for _, axis in plan.extras(operand)]
            left = cost.scatter(phase, name, axes, local(operand) * mesh.size(*axes))
            cost.add(phase, "all_reduce", name, plan.sums(operand), left)

        if "forward" in phases:
            gather("forward", "x", "x")
            gather("forward", "w", "w")
            leave("forward", "y", "y")
        if "dx" in phases or "dw" in phases:
            gather("dx" if "dx" in phases else "dw", "y", "dy")
        if "dx" in phases:
            if "w" not in keep:
                gather("dx", "w", "w")
            leave("dx", "x", "dx")
        if "dw" in phases:
            if "x" not in keep:
                gather("dw", "x", "x")
            leave("dw", "w", "dw")
        return cost.done()


def start_gather(plan: MatmulPlan, mesh: Mesh, operand: Operand, tensor: Tensor) -> Pending:
    """All-gather an operand over its extras, the minor axis first; only the last collective is left in flight."""
    pending = Pending(tensor, None)
    for dim, axis in reversed(plan.steps(operand)):
        pending = collectives.all_gather(pending.wait(), mesh.group(axis), dim, async_op=True)
    return pending


def start_scatter(plan: MatmulPlan, mesh: Mesh, operand: Operand, partial: Tensor) -> Pending:
    """Reduce-scatter partial sums over the operand's extras, the major axis first; only the last is left in flight."""
    pending = Pending(partial, None)
    for dim, axis in plan.steps(operand):
        pending = collectives.reduce_scatter(pending.wait(), mesh.group(axis), dim, async_op=True)
    return pending


def start_sum(plan: MatmulPlan, mesh: Mesh, operand: Operand, scattered: Pending) -> Pending:
    """All-reduce over the summed axes that no scatter has summed over."""
    if mesh.size(*plan.sums(operand)) == 1:
        return scattered
    return collectives.all_reduce(scattered.wait(), mesh.group(*plan.sums(operand)), async_op=True)


def start_leave(plan: MatmulPlan, mesh: Mesh, operand: Operand, partial: Tensor) -> Pending:
    """Partial sums to the operand at rest: scatter, then sum over the rest."""
    return start_sum(plan, mesh, operand, start_scatter(plan, mesh, operand, partial))


def _kept_or_gather(
    plan: MatmulPlan, mesh: Mesh, operand: Operand, shard: Tensor, whole: Tensor | None
) -> Pending:
    return Pending(whole, None) if whole is not None else start_gather(plan, mesh, operand, shard)
