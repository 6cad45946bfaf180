"""The gather lowering: all-gather the operands, multiply once, scatter the result.

    forward   y  = leave(gather(x) gather(w))
    dgrad     dx = leave(gather(dy) gather(w)ᵀ)
    wgrad     dw = leave(gather(x)ᵀ gather(dy))

Backward starts every gather at once and orders the products so that x is gathered under the dgrad product and dx reduced under
the wgrad product. Gathered operands are not kept for backward unless requested: a layer holds only shards.

If x is gathered along k, its blocks arrive one after another, which is not the memory layout of a matrix. Backward needs no copy
for that: it multiplies block by block, each product writing its own rows of dw or block of dx. Forward copies a few rows at a time,
because adding up products of blocks would round each sum to the tensor's precision. Temporaries are released as soon as they are
used, since the largest ones decide the peak memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshfold.mesh import Mesh, Pending, collectives
from meshfold.mesh.collectives import wide_reshape
from meshfold.mesh.recording import weight_gradients
from meshfold.tensor_parallel.cost import Cost, CostBuilder, CostQuery
from meshfold.tensor_parallel.lowerings.common import Pair
from meshfold.tensor_parallel.plan import MatmulPlan, Operand, Phase

_COPIED_ROWS = 1024
"""Least number of rows in a separate product: fewer would not fill a GPU."""


class Gather:
    """All-gather of the operands, one matmul, reduce-scatter of the result."""

    def refuses(self, plan: MatmulPlan) -> str:
        """Return an empty string: every plan can be executed."""
        return ""

    def prepare(self, plan: MatmulPlan, mesh: Mesh) -> None:
        """Do nothing: the plan's own process groups are enough."""

    def forward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, keep: frozenset[str]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        blocks = _block_axis(plan, mesh) if "x" not in keep else ""
        if blocks:
            coming_blocks = collectives.all_gather(x.unsqueeze(0), mesh.group(blocks), 0, async_op=True)
            w_whole = start_gather(plan, mesh, "w", w).wait()
            partial = _multiply_blocks(coming_blocks.wait(), w_whole)
            return start_leave(plan, mesh, "y", partial, own=True).wait(), None, w_whole if "w" in keep else None
        coming_x, coming_w = start_gather(plan, mesh, "x", x), start_gather(plan, mesh, "w", w)
        x_whole, w_whole = coming_x.wait(), coming_w.wait()
        y = start_leave(plan, mesh, "y", x_whole @ w_whole.t(), own=True).wait()
        return y, x_whole if "x" in keep else None, w_whole if "w" in keep else None

    def backward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, dy: Tensor, *, wants: tuple[bool, bool], kept: Pair
    ) -> Pair:
        want_dx, want_dw = wants
        blocks = _block_axis(plan, mesh) if kept[0] is None else ""
        coming_dy = start_gather(plan, mesh, "y", dy)
        coming_w = _kept_or_gather(plan, mesh, "w", w, kept[1]) if want_dx else None
        coming_x = None
        if want_dw and blocks:
            coming_x = collectives.all_gather(x.unsqueeze(0), mesh.group(blocks), 0, async_op=True)
        elif want_dw:
            coming_x = _kept_or_gather(plan, mesh, "x", x, kept[0])
        dy_whole = coming_dy.wait()
        leaving_dx = leaving_dw = None
        if coming_w is not None and blocks:
            partial = _input_gradient_blocks(dy_whole, coming_w.wait(), mesh.size(blocks))
            leaving_dx = collectives.reduce_scatter_inside(partial, mesh.group(blocks))
            del partial
        elif coming_w is not None:
            leaving_dx = start_scatter(plan, mesh, "x", dy_whole @ coming_w.wait())
        del coming_w
        if coming_x is not None:
            make = _weight_gradient_of_blocks if blocks else _weight_gradient
            leaving_dw = start_leave(plan, mesh, "w", make(plan, coming_x.wait(), dy_whole), own=True)
        del coming_x
        dx = None
        if leaving_dx is not None:
            dx = start_sum(plan, mesh, "x", leaving_dx, own=True).wait()
            dx = dx.squeeze(0) if blocks else dx
        return dx, leaving_dw.wait() if leaving_dw is not None else None

    def cost(self, plan: MatmulPlan, query: CostQuery) -> Cost:
        sizes, mesh, phases, keep = query.sizes, query.mesh, query.phases, query.keep
        cost = CostBuilder(mesh, query.itemsize)

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


def _block_axis(plan: MatmulPlan, mesh: Mesh) -> str:
    """Return the axis over which x is gathered along k, if backward should multiply block by block; empty if not."""
    steps = [(dim, axis) for dim, axis in plan.steps("x") if mesh.size(axis) > 1]
    if len(steps) != 1 or steps[0][0] != 1 or torch.compiler.is_compiling():
        return ""  # the compiler fuses the copy and cannot fuse writes into parts
    return steps[0][1]


def _multiply_blocks(x: Tensor, w: Tensor) -> Tensor:
    """Compute ``y = x wᵀ`` from blocks of x along k: ``g m k, n (g k) -> m n``. Only some rows of x are joined at a time."""
    rows = x.shape[1]
    step = max(_COPIED_ROWS, -(-rows // 4))
    if rows <= step:
        return wide_reshape(x.movedim(0, 1), (-1, w.shape[1])) @ w.t()
    y = x.new_empty(rows, w.shape[0])
    for start in range(0, rows, step):
        part = wide_reshape(x[:, start : start + step].movedim(0, 1), (-1, w.shape[1]))
        torch.mm(part, w.t(), out=y[start : start + step])
    return y


def _input_gradient_blocks(dy: Tensor, w: Tensor, blocks: int) -> Tensor:
    """Compute ``dx = dy w`` as blocks along k: ``m n, n (g k) -> g m k``."""
    width = w.shape[1] // blocks
    dx = dy.new_empty(blocks, dy.shape[0], width)
    for block in range(blocks):
        torch.mm(dy, w[:, block * width : (block + 1) * width], out=dx[block])
    return dx


def _weight_gradient_of_blocks(plan: MatmulPlan, x: Tensor, dy: Tensor) -> Tensor:
    """Compute ``dw = dyᵀ x`` from blocks of x along k: ``g m k, m n -> n (g k)``, transposed in memory like the weight."""
    blocks, _, width = x.shape
    turned = dy.new_empty(blocks * width, dy.shape[1])
    for block in range(blocks):
        torch.mm(x[block].t(), dy, out=turned[block * width : (block + 1) * width])
    return turned.t()


def _weight_gradient(plan: MatmulPlan, x: Tensor, dy: Tensor) -> Tensor:
    """Compute ``dw = dyᵀ x``, ``m k, m n -> n k``, with the dim to scatter outermost in memory."""
    return (x.t() @ dy).t() if turns_weight(plan) else dy.t() @ x


def turns_weight(plan: MatmulPlan) -> bool:
    """Return True if a weight ``[n, k]`` should be stored transposed: its blocks, gathered along k, are then contiguous."""
    return any(dim == 1 for dim, _ in plan.steps("w"))


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


def start_sum(plan: MatmulPlan, mesh: Mesh, operand: Operand, scattered: Pending, *, own: bool = False) -> Pending:
    """All-reduce over the summed axes that no scatter covers; ``own``: the caller made the tensor, and only the sum reads it."""
    if mesh.size(*plan.sums(operand)) == 1:
        return scattered
    group = mesh.group(*plan.sums(operand))
    if operand != "w" or torch.compiler.is_compiling():
        return collectives.all_reduce(scattered.wait(), group, async_op=True, own=own)
    with weight_gradients():
        return collectives.all_reduce(scattered.wait(), group, async_op=True, own=own)


def start_leave(plan: MatmulPlan, mesh: Mesh, operand: Operand, partial: Tensor, *, own: bool = False) -> Pending:
    """Scatter partial sums, then sum over the rest: the operand at rest. ``own``: only this reads ``partial``."""
    return start_sum(plan, mesh, operand, start_scatter(plan, mesh, operand, partial), own=own)


def _kept_or_gather(plan: MatmulPlan, mesh: Mesh, operand: Operand, shard: Tensor, whole: Tensor | None) -> Pending:
    return Pending(whole, None) if whole is not None else start_gather(plan, mesh, operand, shard)
