"""An operand of a plan on its own: what a layer does when something other than a matmul uses the tensor.

Embedding looks rows up instead of multiplying, several linear layers share one gathered input: they enter and leave
with the collectives of the plan, differentiably.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from meshfold.mesh import Mesh, collectives
from meshfold.mesh.collectives import Primitive, adjoint_pair, identity
from meshfold.tensor_parallel.lowerings.gather import start_gather, start_leave
from meshfold.tensor_parallel.plan import MatmulPlan


def bind_enter_operand(plan: MatmulPlan, mesh: Mesh, operand: Literal["x", "w"]) -> Primitive:
    """Gathers x or w over its extras; backward scatters and sums the gradient as dx or dw leaves.

    The result takes a tensor of two dims, local at rest: ``[m, k]`` for x, ``[n, k]`` for w.
    """
    plan.prepare(mesh)
    return mesh.once(
        ("enter operand", plan, operand),
        lambda: adjoint_pair(
            lambda tensor: start_gather(plan, mesh, operand, tensor).wait(),
            lambda grad: start_leave(plan, mesh, operand, grad).wait(),
        ),
    )


def bind_leave_operand(plan: MatmulPlan, mesh: Mesh) -> Primitive:
    """Scatters and sums y, ``[m, n]`` partial sums to local at rest; backward gathers dy."""
    plan.prepare(mesh)
    return mesh.once(
        ("leave operand", plan),
        lambda: adjoint_pair(
            lambda partial: start_leave(plan, mesh, "y", partial).wait(),
            lambda grad: start_gather(plan, mesh, "y", grad).wait(),
        ),
    )


def bind_sum_repeated(mesh: Mesh, dim: int, spans: tuple[tuple[int, int, tuple[str, ...]], ...]) -> Primitive:
    """Identity on a parameter some stretches of which are held by several ranks, each using its copy differently
    (key/value heads when there are fewer than ranks); backward sums the gradient of those stretches.

    Args:
        mesh: where it lies.
        dim: the dim that has the stretches.
        spans: (start, length, axes) of each stretch, in local elements; an axis may be a factor such as ``"tensor%2"``.
    """
    if all(mesh.size(*axes) == 1 for _, _, axes in spans):
        return identity
    for _, _, axes in spans:
        mesh.prepare(*axes)

    def sum_stretches(grad: Tensor) -> Tensor:
        grad = grad.clone()
        for start, length, axes in spans:
            stretch = grad.narrow(dim, start, length)
            stretch.copy_(collectives.all_reduce(stretch, mesh.group(*axes)))
        return grad

    return mesh.once(("sum repeated", dim, spans), lambda: adjoint_pair(identity, sum_stretches))
