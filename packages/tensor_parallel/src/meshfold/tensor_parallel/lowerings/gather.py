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
from typing import TypeAlias

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
        return _bound(plan, mesh).forward(x, w, keep)

    def backward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, dy: Tensor, *, wants: tuple[bool, bool], kept: Pair
    ) -> Pair:
        return _bound(plan, mesh).backward(x, w, dy, wants=wants, kept=kept)

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


def _bound(plan: MatmulPlan, mesh: Mesh) -> BoundGather:
    """Return the lowering of one plan for a caller that has not kept it; torch.compile traces its making."""
    if torch.compiler.is_compiling():
        return BoundGather(plan, mesh)
    return bind_gather(plan, mesh)


def bind_gather(plan: MatmulPlan, mesh: Mesh) -> BoundGather:
    """Return the gather lowering of one plan on a mesh, made once."""
    return mesh.once(("gather", plan), lambda: BoundGather(plan, mesh))


class BoundGather:
    """The gather lowering of one plan on a mesh: what is sent is found once, so that the host's time goes to what is done.

    Attributes:
        takes_bias: :meth:`forward` can add a bias, because y has the columns of the product.
    """

    def __init__(self, plan: MatmulPlan, mesh: Mesh) -> None:
        """``plan`` and ``mesh``: of the product."""
        self._mesh = mesh
        self._x, self._w, self._y = (Moves(plan, mesh, operand) for operand in ("x", "w", "y"))
        self._gathers_inputs = self._x.gathers or self._w.gathers
        self._only_sums = not (self._gathers_inputs or self._y.gathers)
        self._turned = turns_weight(plan)
        steps = [(dim, axis) for dim, axis in plan.steps("x") if mesh.size(axis) > 1]
        self._block_axis = steps[0][1] if len(steps) == 1 and steps[0][0] == 1 else ""
        """over which x is gathered along k, if backward should multiply block by block"""
        summing = (*(axis for _, axis in plan.steps("y")), *plan.sums("y"))
        self._summing = summing if mesh.size(*summing) > 1 else ()
        self.takes_bias = all(dim == 0 or mesh.size(axis) == 1 for dim, axis in plan.steps("y"))

    def forward(
        self, x: Tensor, w: Tensor, keep: frozenset[str], bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See :class:`.Lowering`; ``bias``: ``n``, which the first of the ranks adds whose partial sums become y."""
        if bias is not None and self._summing and self._mesh.index(*self._summing):
            bias = None
        if self._block_axis and "x" not in keep and not torch.compiler.is_compiling():
            coming_blocks = collectives.all_gather(x.unsqueeze(0), self._mesh.group(self._block_axis), 0, async_op=True)
            w_whole = self._w.gather(w)
            y = _multiply_blocks(coming_blocks.wait(), w_whole)
            y = y if bias is None else y.add_(bias)
            return self._y.leave(y, own=True), None, w_whole if "w" in keep else None
        if self._gathers_inputs:
            coming_x, coming_w = self._x.start_gather(x), self._w.start_gather(w)
            x, w = _arrived(coming_x), _arrived(coming_w)
        y = torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
        return self._y.leave(y, own=True), x if "x" in keep else None, w if "w" in keep else None

    def backward(self, x: Tensor, w: Tensor, dy: Tensor, *, wants: tuple[bool, bool], kept: Pair) -> Pair:
        """See :class:`.Lowering`."""
        if not self._only_sums:
            return self._backward(x, w, dy, wants, kept)
        leaving_dx = self._x.start_sum(torch.mm(dy, w), own=True) if wants[0] else None
        dw = self._w.leave(self._weight_gradient(x, dy), own=True) if wants[1] else None
        return None if leaving_dx is None else _arrived(leaving_dx), dw

    def _backward(self, x: Tensor, w: Tensor, dy: Tensor, wants: tuple[bool, bool], kept: Pair) -> Pair:
        """Compute both gradients where an operand is gathered or scattered."""
        want_dx, want_dw = wants
        # The compiler fuses the copy and cannot fuse writes into parts.
        blocks = self._block_axis if kept[0] is None and not torch.compiler.is_compiling() else ""
        coming_dy = self._y.start_gather(dy)
        coming_w: Coming | None = None
        if want_dx:
            coming_w = self._w.start_gather(w) if kept[1] is None else kept[1]
        coming_x: Coming | None = None
        if want_dw and blocks:
            coming_x = collectives.all_gather(x.unsqueeze(0), self._mesh.group(blocks), 0, async_op=True)
        elif want_dw:
            coming_x = self._x.start_gather(x) if kept[0] is None else kept[0]
        dy_whole = _arrived(coming_dy)
        leaving_dx: Coming | None = None
        leaving_dw: Coming | None = None
        if coming_w is not None and blocks:
            partial = _input_gradient_blocks(dy_whole, _arrived(coming_w), self._mesh.size(blocks))
            leaving_dx = collectives.reduce_scatter_inside(partial, self._mesh.group(blocks))
            del partial
        elif coming_w is not None:
            leaving_dx = self._x.start_scatter(torch.mm(dy_whole, _arrived(coming_w)))
        del coming_w
        if coming_x is not None:
            make = _weight_gradient_of_blocks if blocks else self._weight_gradient
            leaving_dw = self._w.start_leave(make(_arrived(coming_x), dy_whole), own=True)
        del coming_x
        dx = None
        if leaving_dx is not None:
            dx = self._x.sum(_arrived(leaving_dx), own=True)
            dx = dx.squeeze(0) if blocks else dx
        return dx, None if leaving_dw is None else _arrived(leaving_dw)

    def _weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """Compute ``dw = dyᵀ x``, ``m k, m n -> n k``, with the dim to scatter outermost in memory."""
        return torch.mm(x.t(), dy).t() if self._turned else torch.mm(dy.t(), x)


Coming: TypeAlias = Tensor | Pending
"""An operand on its way, or here."""


def _arrived(coming: Coming) -> Tensor:
    return coming.wait() if isinstance(coming, Pending) else coming


class Moves:
    """The collectives of one operand of a plan on a mesh: those that send something, found once.

    Attributes:
        gathers: it is gathered on its way to the product, and scattered on the way back.
        sums: it is all-reduced over axes that no scatter covers.
    """

    def __init__(self, plan: MatmulPlan, mesh: Mesh, operand: Operand) -> None:
        """``operand``: ``y`` is also dy, ``x`` dx, ``w`` dw."""
        self._mesh, self._of_weights = mesh, operand == "w"
        self._scattered = tuple((dim, axis) for dim, axis in plan.steps(operand) if mesh.size(axis) > 1)
        self._gathered = self._scattered[::-1]
        self._summed = plan.sums(operand) if mesh.size(*plan.sums(operand)) > 1 else ()
        self.gathers, self.sums = bool(self._scattered), bool(self._summed)

    def start_gather(self, shard: Tensor) -> Coming:
        """All-gather it, the minor axis first; only the last collective is left in flight."""
        coming: Coming = shard
        for dim, axis in self._gathered:
            coming = collectives.all_gather(_arrived(coming), self._mesh.group(axis), dim, async_op=True)
        return coming

    def gather(self, shard: Tensor) -> Tensor:
        """Return the whole operand."""
        for dim, axis in self._gathered:
            shard = collectives.all_gather(shard, self._mesh.group(axis), dim)
        return shard

    def start_scatter(self, partial: Tensor) -> Coming:
        """Reduce-scatter partial sums, the major axis first; only the last is left in flight."""
        leaving: Coming = partial
        for dim, axis in self._scattered:
            leaving = collectives.reduce_scatter(_arrived(leaving), self._mesh.group(axis), dim, async_op=True)
        return leaving

    def start_sum(self, scattered: Tensor, *, own: bool = False) -> Coming:
        """All-reduce over the summed axes that no scatter covers; ``own``: the caller made it, and only the sum reads it."""
        if not self.sums:
            return scattered
        group = self._mesh.group(*self._summed)
        if not self._of_weights or torch.compiler.is_compiling():
            return collectives.all_reduce(scattered, group, async_op=True, own=own)
        with weight_gradients():
            return collectives.all_reduce(scattered, group, async_op=True, own=own)

    def sum(self, scattered: Tensor, *, own: bool = False) -> Tensor:
        """Return :meth:`start_sum`, waited for."""
        return _arrived(self.start_sum(scattered, own=own)) if self.sums else scattered

    def start_leave(self, partial: Tensor, *, own: bool = False) -> Coming:
        """Scatter partial sums, then sum over the rest: the operand at rest. ``own``: only this reads ``partial``."""
        scattered = self.start_scatter(partial)
        return self.start_sum(_arrived(scattered), own=own) if self.sums else scattered

    def leave(self, partial: Tensor, *, own: bool = False) -> Tensor:
        """Return :meth:`start_leave`, waited for."""
        for dim, axis in self._scattered:
            partial = collectives.reduce_scatter(partial, self._mesh.group(axis), dim)
        return self.sum(partial, own=own) if self.sums else partial


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


def _weight_gradient_of_blocks(x: Tensor, dy: Tensor) -> Tensor:
    """Compute ``dw = dyᵀ x`` from blocks of x along k: ``g m k, m n -> n (g k)``, transposed in memory like the weight."""
    blocks, _, width = x.shape
    turned = dy.new_empty(blocks * width, dy.shape[1])
    for block in range(blocks):
        torch.mm(x[block].t(), dy, out=turned[block * width : (block + 1) * width])
    return turned.t()


def turns_weight(plan: MatmulPlan) -> bool:
    """Return True if a weight ``[n, k]`` should be stored transposed: its blocks, gathered along k, are then contiguous."""
    return any(dim == 1 for dim, _ in plan.steps("w"))


def _moves(plan: MatmulPlan, mesh: Mesh, operand: Operand) -> Moves:
    if torch.compiler.is_compiling():
        return Moves(plan, mesh, operand)
    return mesh.once(("moves", plan, operand), lambda: Moves(plan, mesh, operand))


def start_gather(plan: MatmulPlan, mesh: Mesh, operand: Operand, tensor: Tensor) -> Pending:
    """All-gather an operand over its extras: see :meth:`Moves.start_gather`."""
    return _pending(_moves(plan, mesh, operand).start_gather(tensor))


def start_scatter(plan: MatmulPlan, mesh: Mesh, operand: Operand, partial: Tensor) -> Pending:
    """Reduce-scatter partial sums over an operand's extras: see :meth:`Moves.start_scatter`."""
    return _pending(_moves(plan, mesh, operand).start_scatter(partial))


def start_sum(plan: MatmulPlan, mesh: Mesh, operand: Operand, scattered: Pending, *, own: bool = False) -> Pending:
    """All-reduce over the summed axes that no scatter covers: see :meth:`Moves.start_sum`."""
    moves = _moves(plan, mesh, operand)
    return _pending(moves.start_sum(scattered.wait(), own=own)) if moves.sums else scattered


def start_leave(plan: MatmulPlan, mesh: Mesh, operand: Operand, partial: Tensor, *, own: bool = False) -> Pending:
    """Scatter partial sums, then sum over the rest: the operand at rest. ``own``: only this reads ``partial``."""
    return _pending(_moves(plan, mesh, operand).start_leave(partial, own=own))


def _pending(coming: Coming) -> Pending:
    return coming if isinstance(coming, Pending) else Pending(coming, None)
