"""The sharded matmul in fp8: the gather lowering, whose operands are rounded once they are gathered.

A scale belongs to a row or a tensor of the whole operand, of which a rank has a block. The amax is reduced over the axes that split
the dims it was taken over, those of the batch among them, so that the rounded operands are those of the serial model, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import Fp8Dim, Fp8Maximum, Fp8Recipe, fp8_input_gradient, fp8_output, fp8_weight_gradient
from meshfold.mesh import Mesh, collectives
from meshfold.mesh.collectives import non_view_result
from meshfold.tensor_parallel.lowerings.gather import start_gather, start_leave
from meshfold.tensor_parallel.matmul import Product, lead_shape
from meshfold.tensor_parallel.plan import MatmulPlan


def bind_fp8_maximum(mesh: Mesh, plan: MatmulPlan | None, outer_axes: tuple[str, ...]) -> Fp8Maximum:
    """Bind the reduction of an amax that was taken over the dims m, k or n of a gathered operand.

    Args:
        mesh: where the operand lies.
        plan: of the matmul; None if tensor parallelism splits nothing.
        outer_axes: those that split the tokens beside the plan's: of data and of sequences.
    """
    groups: dict[str, list[tuple[str, ...]]] = {"m": [], "k": [], "n": []}
    if plan is not None:
        for dim, name in (("m", plan.m), ("k", plan.k), ("n", plan.n)):
            groups[dim] = [(axis,) for axis in plan.compute[name]]
    groups["m"].append(outer_axes)
    for axes in dict.fromkeys(each for found in groups.values() for each in found):  # in one order on every rank
        mesh.prepare(*axes)

    def maximum(amax: Tensor, dims: tuple[Fp8Dim, ...]) -> Tensor:
        for dim in dims:
            for axes in groups[dim]:
                amax = collectives.all_reduce(amax, mesh.group(*axes), "max")
        return amax

    return maximum


def bind_fp8_product(plan: MatmulPlan, mesh: Mesh, recipe: Fp8Recipe, outer_axes: tuple[str, ...]) -> Product:
    """Bind ``y = x wᵀ`` on local blocks, as :func:`meshfold.tensor_parallel.matmul` computes it, with operands in fp8."""
    plan.prepare(mesh)
    return mesh.once(("fp8 matmul", plan, recipe, outer_axes), lambda: _make(plan, mesh, recipe, outer_axes))


def _make(plan: MatmulPlan, mesh: Mesh, recipe: Fp8Recipe, outer_axes: tuple[str, ...]) -> Product:
    maximum = bind_fp8_maximum(mesh, plan, outer_axes)

    class Fp8Matmul(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            coming_x, coming_w = start_gather(plan, mesh, "x", x), start_gather(plan, mesh, "w", w)
            partial = fp8_output(coming_x.wait(), coming_w.wait(), recipe, maximum)
            return non_view_result(start_leave(plan, mesh, "y", partial).wait(), x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, w = ctx.saved_tensors
            want_dx, want_dw = ctx.needs_input_grad
            coming_dy = start_gather(plan, mesh, "y", dy)
            coming_w = start_gather(plan, mesh, "w", w) if want_dx else None
            coming_x = start_gather(plan, mesh, "x", x) if want_dw else None
            dy = coming_dy.wait()
            leaving_dx = leaving_dw = None
            if coming_w is not None:
                leaving_dx = start_leave(plan, mesh, "x", fp8_input_gradient(dy, coming_w.wait(), recipe, maximum))
            if coming_x is not None:
                leaving_dw = start_leave(plan, mesh, "w", fp8_weight_gradient(dy, coming_x.wait(), recipe, maximum))
            dx = None if leaving_dx is None else leaving_dx.wait()
            return dx, None if leaving_dw is None else leaving_dw.wait()

    def product(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = Fp8Matmul.apply(x.reshape(-1, x.shape[-1]), w)
        return y.view(*lead_shape(x.shape[:-1], y.shape[0]), y.shape[-1])

    return product
