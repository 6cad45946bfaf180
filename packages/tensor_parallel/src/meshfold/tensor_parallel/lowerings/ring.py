"""The ring lowering: collective matmul (Wang et al., ASPLOS 2023, "Overlap Communication with Dependent Computation").

One collective of each product is decomposed into shifts around the ring of its group, each hidden under a matmul of
the block that has already arrived. ``g`` ranks, ``g − 1`` shifts:

=================================== ===============================================================================
what runs as a ring                 at each step, while the next block is sent
=================================== ===============================================================================
gather along a dim of the output    multiply the block, write its rows or columns of the output
gather along the summed dim         multiply the block with its slice of the other operand, add to the output
scatter of the output               multiply the part of the most distant rank, add what has arrived,
                                    send it on; the last part is this rank's own
=================================== ===============================================================================

The collective of a product that moves most bytes runs as a ring. Among equals it is the first input's, then the second's, then the
output's (:data:`~meshfold.tensor_parallel.lowerings.common.INPUTS`). The others are executed as in the gather lowering. An operand
can run as a ring if it is gathered or scattered along one dim; several axes there make one ring. The bytes equal the gather
lowering's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshfold.mesh import Mesh, Pending, collectives
from meshfold.tensor_parallel.cost import Cost, CostBuilder, CostQuery
from meshfold.tensor_parallel.lowerings.common import (
    INPUTS,
    Pair,
    Sum,
    brick_sizes,
    factors,
    split_axes,
    split_dims,
    stored_dims,
    tensor_dim,
)
from meshfold.tensor_parallel.lowerings.gather import start_gather, start_leave, start_sum
from meshfold.tensor_parallel.plan import MatmulPlan, Operand, Phase

_Whole = dict["Operand", Tensor]


class Ring:
    """Shifts of blocks round the ring under partial matmuls."""

    def refuses(self, plan: MatmulPlan) -> str:
        """Return a reason for plans without any gather or scatter."""
        operands: tuple[Operand, ...] = ("x", "w", "y")
        if any(plan.extras(operand) for operand in operands):
            return ""
        return "x, w and y are used as they lie at rest, so nothing can be passed round a ring"

    def prepare(self, plan: MatmulPlan, mesh: Mesh) -> None:
        """Make the groups of rings: one runs over all axes of an operand at once."""
        operands: tuple[Operand, ...] = ("x", "w", "y")
        for operand in operands:
            mesh.prepare(*split_axes(plan, mesh, operand))

    def forward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, keep: frozenset[str]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        product = _Product(plan, mesh, "y", brick_sizes(plan, mesh, x.shape, w.shape[0]), arrived=frozenset())
        coming = product.start({"x": x, "w": w}, {})
        y, whole = product.run(coming, keep)
        return y.wait(), whole["x"] if "x" in keep else None, whole["w"] if "w" in keep else None

    def backward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, dy: Tensor, *, wants: tuple[bool, bool], kept: Pair
    ) -> Pair:
        want_dx, want_dw = wants
        sizes = brick_sizes(plan, mesh, x.shape, w.shape[0])
        both: dict[Operand, Tensor | None] = {"x": kept[0], "w": kept[1]}
        whole: _Whole = {operand: tensor for operand, tensor in both.items() if tensor is not None}
        shards: _Whole = {"x": x, "w": w, "y": dy}
        dx = dw = None
        products = _backward_products(plan, mesh, sizes, wants, frozenset(whole))
        # Start gathering x before dx is computed, and reduce dx during the product of dw.
        coming = {out: product.start(shards, whole) for out, product in products.items()}
        if want_dx:
            dx, found = products["x"].run(coming.pop("x"), frozenset({"y"}) if want_dw else frozenset())
            if want_dw:
                coming["w"]["y"] = Pending(found["y"], None)
            del found
        if want_dw:
            dw, _ = products["w"].run(coming["w"], frozenset())
        return dx.wait() if dx is not None else None, dw.wait() if dw is not None else None

    def cost(self, plan: MatmulPlan, query: CostQuery) -> Cost:
        sizes, mesh, phases, keep = query.sizes, query.mesh, query.phases, query.keep
        cost = CostBuilder(mesh, query.itemsize)
        local = {dim: sizes[dim] // mesh.size(*axes) for dim, axes in plan.compute.items()}
        if "forward" in phases:
            _Product(plan, mesh, "y", local, arrived=frozenset()).count(cost, "forward")
        inputs: tuple[Operand, Operand] = ("x", "w")
        arrived = frozenset(operand for operand in inputs if operand in keep)
        for out, product in _backward_products(plan, mesh, local, ("dx" in phases, "dw" in phases), arrived).items():
            product.count(cost, "dx" if out == "x" else "dw")
        return cost.done()


def _backward_products(
    plan: MatmulPlan,
    mesh: Mesh,
    sizes: Mapping[str, int],
    wants: tuple[bool, bool],
    arrived: frozenset[Operand],
) -> dict[Operand, _Product]:
    products: dict[Operand, _Product] = {}
    if wants[0]:
        products["x"] = _Product(plan, mesh, "x", sizes, arrived)
    if wants[1]:  # computing dx has gathered dy
        products["w"] = _Product(plan, mesh, "w", sizes, arrived | {"y"} if wants[0] else arrived)
    return products


class _Product:
    """One of the three products with its collectives; at most one of them runs as a ring."""

    def __init__(
        self,
        plan: MatmulPlan,
        mesh: Mesh,
        out: Operand,
        sizes: Mapping[str, int],
        arrived: frozenset[Operand],
    ) -> None:
        """``sizes``: the rank's share of the product along m, k and n, elements; ``arrived``: inputs that need no gather."""
        self.plan, self.mesh, self.out, self.sizes = plan, mesh, out, sizes
        self.gathered = tuple(operand for operand in INPUTS[out] if operand not in arrived)
        self.ring: Operand | None = None
        largest = 0
        for operand in (*self.gathered, out):
            ranks = mesh.size(*split_axes(plan, mesh, operand))
            moved = (ranks - 1) * self.at_rest(operand)
            if moved > largest and len(split_dims(plan, mesh, operand)) == 1:
                self.ring, largest = operand, moved

    def at_rest(self, operand: Operand) -> int:
        """Return the elements of an operand's local block at rest."""
        a, b = stored_dims(self.plan, operand)
        return self.sizes[a] * self.sizes[b] // self.mesh.size(*split_axes(self.plan, self.mesh, operand))

    def start(self, shards: Mapping[Operand, Tensor], whole: Mapping[Operand, Tensor]) -> dict[Operand, Pending]:
        """Issue the gathers, except of the ring's operand and of inputs that arrive later."""
        coming: dict[Operand, Pending] = {}
        for operand in INPUTS[self.out]:
            if operand in whole:
                coming[operand] = Pending(whole[operand], None)
            elif operand == self.ring:
                coming[operand] = Pending(shards[operand], None)
            elif operand in self.gathered:
                coming[operand] = start_gather(self.plan, self.mesh, operand, shards[operand])
        return coming

    def run(self, coming: Mapping[Operand, Pending], keep: frozenset[str]) -> tuple[Pending, _Whole]:
        """Return (the pending output, the gathered inputs); the ring's input is assembled only if ``keep`` names it."""
        if self.ring == self.out:
            inputs = {operand: pending.wait() for operand, pending in coming.items()}
            return start_sum(self.plan, self.mesh, self.out, Pending(self._scattered(inputs), None)), inputs
        if self.ring is not None:
            partial, inputs = self._gathered(self.ring, coming, self.ring in keep)
        else:
            inputs = {operand: pending.wait() for operand, pending in coming.items()}
            a, b = factors(self.out, inputs)
            partial = a @ b
        return start_leave(self.plan, self.mesh, self.out, partial), inputs

    def _gathered(self, ring: Operand, coming: Mapping[Operand, Pending], keep: bool) -> tuple[Tensor, _Whole]:
        """Compute the product while one input arrives block by block."""
        plan, mesh = self.plan, self.mesh
        axes = split_axes(plan, mesh, ring)
        group = mesh.group(*axes)
        numbers = mesh.numbers(*axes)
        (dim,) = split_dims(plan, mesh, ring)
        (other,) = (operand for operand in INPUTS[self.out] if operand != ring)
        block, length = coming[ring].wait(), self.sizes[dim] // group.size
        summed = dim not in getattr(plan, self.out)
        total = Sum(block.dtype)
        out = block.new_empty([0] if summed else [self.sizes[d] for d in stored_dims(plan, self.out)])
        blocks: dict[int, Tensor] = {}
        whole: Tensor | None = None
        for step in range(group.size):
            travelling = collectives.shift(block, group, async_op=True) if step + 1 < group.size else None
            number = numbers[(group.index - step) % group.size]
            if whole is None:
                whole = coming[other].wait()
            if keep:
                blocks[number] = block
            if summed:
                piece = whole.narrow(tensor_dim(plan, other, dim), number * length, length)
                total.add(*factors(self.out, {ring: block, other: piece}))
            else:
                a, b = factors(self.out, {ring: block, other: whole})
                out.narrow(tensor_dim(plan, self.out, dim), number * length, length).addmm_(a, b, beta=0)
            if travelling is not None:
                block = travelling.wait()
        found: _Whole = {} if whole is None else {other: whole}
        if keep:
            found[ring] = torch.cat([blocks[number] for number in sorted(blocks)], tensor_dim(plan, ring, dim))
        return total.done() if summed else out, found

    def _scattered(self, inputs: Mapping[Operand, Tensor]) -> Tensor:
        """Compute the product reduce-scattered over the output's extra axes: each part is computed, added to and passed on."""
        plan, mesh = self.plan, self.mesh
        axes = split_axes(plan, mesh, self.out)
        group = mesh.group(*axes)
        numbers = mesh.numbers(*axes)
        (dim,) = split_dims(plan, mesh, self.out)
        (cut,) = (operand for operand in inputs if dim in getattr(plan, operand))
        length = self.sizes[dim] // group.size
        travelling: Pending | None = None
        for step in range(group.size):
            number = numbers[(group.index - 1 - step) % group.size]
            piece = inputs[cut].narrow(tensor_dim(plan, cut, dim), number * length, length)
            a, b = factors(self.out, {**inputs, cut: piece})
            part = a @ b
            if travelling is not None:
                part += travelling.wait()
            if step + 1 < group.size:
                travelling = collectives.shift(part, group, async_op=True)
        return part

    def count(self, cost: CostBuilder, phase: Phase) -> None:
        """Count the collectives that :meth:`start` and :meth:`run` issue."""
        plan, mesh = self.plan, self.mesh
        names = {operand: operand for operand in self.gathered} | {self.out: f"d{self.out}"}
        if phase == "forward":
            names[self.out] = "y"
        elif "y" in names:
            names["y"] = "dy"
        for operand in (*self.gathered, self.out):
            axes = [axis for _, axis in plan.extras(operand)]
            elements = self.at_rest(operand)
            if operand == self.ring:
                for _ in range(mesh.size(*axes) - 1):
                    cost.add(phase, "shift", names[operand], axes, elements)
            elif operand == self.out:
                cost.scatter(phase, names[operand], axes, elements * mesh.size(*axes))
            else:
                cost.gather(phase, names[operand], list(reversed(axes)), elements)
        cost.add(phase, "all_reduce", names[self.out], plan.sums(self.out), self.at_rest(self.out))
