"""An operand of a plan on its own: what a layer does when something other than a matmul uses the tensor.

Embedding looks rows up instead of multiplying, several linear layers share one gathered input: they enter and leave
with the collectives of the plan, differentiably.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import Mesh, collectives
from meshfold.tensor_parallel.algebra import MatmulPlan
from meshfold.tensor_parallel.lowerings.gather import start_gather, start_leave


def enter_operand(tensor: Tensor, plan: MatmulPlan, mesh: Mesh, operand: str) -> Tensor:
    """Gather x or w over its extras; backward scatters and sums the gradient as dx or dw leaves.

    Args:
        tensor: two dims, local at rest: ``[m, k]`` for x, ``[n, k]`` for w.
        plan: whose operand it is.
        mesh: where it lies.
        operand: ``"x"`` or ``"w"``.
    """
    return _Enter.apply(tensor, plan, mesh, operand)  # type: ignore[no-any-return, no-untyped-call]


def leave_operand(partial: Tensor, plan: MatmulPlan, mesh: Mesh) -> Tensor:
    """Scatter and sum y, ``[m, n]`` partial sums to local at rest; backward gathers dy."""
    return _Leave.apply(partial, plan, mesh)  # type: ignore[no-any-return, no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, plan: MatmulPlan, mesh: Mesh, operand: Any) -> Tensor:
        ctx.plan, ctx.mesh, ctx.operand = plan, mesh, operand
        whole = start_gather(plan, mesh, operand, tensor).wait()
        return whole.view_as(whole) if whole is tensor else whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return start_leave(ctx.plan, ctx.mesh, ctx.operand, grad).wait(), None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, plan: MatmulPlan, mesh: Mesh) -> Tensor:
        ctx.plan, ctx.mesh = plan, mesh
        y = start_leave(plan, mesh, "y", partial).wait()
        return y.view_as(y) if y is partial else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return start_gather(ctx.plan, ctx.mesh, "y", grad).wait(), None, None


def sum_repeated(parameter: Tensor, mesh: Mesh, dim: int, spans: tuple[tuple[int, int, str], ...]) -> Tensor:
    """Identity on a parameter some stretches of which are held by several ranks, each using its copy differently
    (key/value heads when there are fewer than ranks); backward sums the gradient of those stretches.

    Args:
        parameter: local block.
        mesh: where it lies.
        dim: the dim that has the stretches.
        spans: (start, length, axis factor such as ``"tensor%2"``) of each stretch, in local elements.
    """
    if all(mesh.size(axis) == 1 for _, _, axis in spans):
        return parameter
    return _SumRepeated.apply(parameter, mesh, dim, spans)  # type: ignore[no-any-return, no-untyped-call]


class _SumRepeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, mesh: Mesh, dim: int, spans: tuple[tuple[int, int, str], ...]) -> Tensor:
        ctx.mesh, ctx.dim, ctx.spans = mesh, dim, spans
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        for start, length, axis in ctx.spans:
            stretch = grad.narrow(ctx.dim, start, length)
            stretch.copy_(collectives.all_reduce(stretch, ctx.mesh.group(axis)))
        return grad, None, None, None
