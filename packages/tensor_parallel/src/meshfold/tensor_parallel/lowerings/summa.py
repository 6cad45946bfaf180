"""The stream lowering: SUMMA (van de Geijn and Watts, 1997; on a 2D grid of GPUs: Optimus, arXiv 2104.05343).

Applies if all gathers are along k. With k split over ``p`` ranks in x and ``q`` in w, k has ``L = lcm(p, q)`` panels, each within
one block of x and one of w:

    forward   for j < L:  y += bcast(x_j) bcast(w_j);             y leaves
    dgrad     for j < J:  dx_j = scatter(dy gather(w_j)ᵀ);        dx is summed over the axes left
    wgrad     for j < J:  dw_j = scatter(gather(x_j)ᵀ dy);        dw is summed over the axes left

Communication for step ``j + 1`` is issued before step ``j`` is multiplied. The extra memory is two panels of each operand; the
gather lowering holds all L.

Backward does not stream whole panels. The sum of a panel belongs to one rank. But not every back end has a reduction to one rank
that torch.compile can trace. So step ``j`` takes a thin slice of *every* panel. Each rank gives a slice of its own block, an
all-gather makes a matrix of the width of a panel, and a reduce-scatter returns to each owner its part of the product. The bytes
equal the gather lowering's, in ``J = min(L, width of a panel)`` steps, and all ranks send at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from meshfold.mesh import LayoutError, Mesh, Pending, collectives
from meshfold.tensor_parallel.cost import Cost, CostBuilder, CostQuery
from meshfold.tensor_parallel.lowerings.common import Pair, Sum, factors, split_axes
from meshfold.tensor_parallel.lowerings.gather import start_gather, start_leave, start_scatter, start_sum
from meshfold.tensor_parallel.plan import MatmulPlan, Operand, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Panels:
    """Cuts of k into panels.

    Attributes:
        axes: of x and of w, the axes that their blocks of k are gathered over, major first.
        count: panels, L.
        width: elements of k in a panel.
        per_block: of x and of w, how many panels a block holds.
    """

    axes: Mapping[Operand, tuple[str, ...]]
    count: int
    width: int
    per_block: Mapping[Operand, int]

    @staticmethod
    def of(plan: MatmulPlan, mesh: Mesh, k_of_x: int, k_of_w: int) -> Panels:
        """Make them from the elements of k in a block of x and in one of w.

        Raises:
            LayoutError: if the two do not give the same k.
        """
        axes: dict[Operand, tuple[str, ...]] = {
            "x": split_axes(plan, mesh, "x"),
            "w": split_axes(plan, mesh, "w"),
        }
        p, q = mesh.size(*axes["x"]), mesh.size(*axes["w"])
        if k_of_x * p != k_of_w * q:
            raise LayoutError(
                f"x holds {k_of_x} × {p} elements of {plan.k} and w {k_of_w} × {q}: shard both from the same {plan.k}, "
                f"a multiple of {math.lcm(p, q)}"
            )
        count = math.lcm(p, q)
        return Panels(axes=axes, count=count, width=k_of_x * p // count, per_block={"x": count // p, "w": count // q})

    @property
    def slices(self) -> list[tuple[int, int]]:
        """Slices (start, length) of a panel, one for each backward step."""
        steps = max(min(self.count, self.width), 1)
        bounds = [step * self.width // steps for step in range(steps + 1)]
        return [(start, end - start) for start, end in pairwise(bounds)]

    def take(self, block: Tensor, start: int, length: int) -> Tensor:
        """Return the same slice of every panel in a block: ``r (panels width) -> r (panels length)``."""
        panels = block.view(block.shape[0], -1, self.width)
        return panels[:, :, start : start + length].reshape(block.shape[0], -1)

    def put(self, block: Tensor, start: int, length: int, piece: Tensor) -> None:
        """Undo :meth:`take`: write the slice back into a block."""
        panels = block.view(block.shape[0], -1, self.width)
        panels[:, :, start : start + length] = piece.view(block.shape[0], -1, length)


class Summa:
    """Broadcasts of one panel of k at a time, accumulated."""

    def refuses(self, plan: MatmulPlan) -> str:
        """Return a reason unless x or w is gathered, and along k only."""
        operands: tuple[Operand, ...] = ("x", "w")
        extras = [(operand, dim) for operand in operands for dim, _ in plan.extras(operand)]
        for operand, dim in extras:
            if dim != plan.k:
                return f"{operand} is gathered along {dim}, and panels are streamed along {plan.k} only"
        return "" if extras else "neither x nor w is gathered, so there is nothing to stream"

    def prepare(self, plan: MatmulPlan, mesh: Mesh) -> None:
        """Make the groups of broadcasts: one runs over all axes of an operand at once."""
        mesh.prepare(*split_axes(plan, mesh, "x"))
        mesh.prepare(*split_axes(plan, mesh, "w"))

    def forward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, keep: frozenset[str]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        panels = Panels.of(plan, mesh, x.shape[1], w.shape[1])
        sources: dict[Operand, tuple[int, ...]] = {
            operand: mesh.numbers(*axes) for operand, axes in panels.axes.items()
        }

        def fetch(operand: Operand, block: Tensor, number: int) -> Pending:
            owner, place = divmod(number, panels.per_block[operand])
            # Other ranks pass their own panel as a buffer of the same shape; only the owner's is sent.
            panel = block.narrow(1, place * panels.width, panels.width)
            group = mesh.group(*panels.axes[operand])
            return collectives.broadcast(panel, group, sources[operand].index(owner), async_op=True)

        coming = fetch("x", x, 0), fetch("w", w, 0)
        kept: dict[str, list[Tensor]] = {operand: [] for operand in keep}
        total = Sum(x.dtype)
        for number in range(panels.count):
            x_panel, w_panel = coming[0].wait(), coming[1].wait()
            if number + 1 < panels.count:
                coming = fetch("x", x, number + 1), fetch("w", w, number + 1)
            total.add(x_panel, w_panel.t())
            for operand, panel in (("x", x_panel), ("w", w_panel)):
                if operand in keep:
                    kept[operand].append(panel)
        leaving = start_leave(plan, mesh, "y", total.done())
        whole = {operand: torch.cat(arrived, dim=1) for operand, arrived in kept.items()}
        return leaving.wait(), whole.get("x"), whole.get("w")

    def backward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, dy: Tensor, *, wants: tuple[bool, bool], kept: Pair
    ) -> Pair:
        panels = Panels.of(plan, mesh, x.shape[1], w.shape[1])
        coming_dy = start_gather(plan, mesh, "y", dy)
        made: dict[Operand, Tensor] = {}
        steps: list[tuple[Operand, int, int]] = []  # gradient, and its slice
        blocks: dict[Operand, Tensor] = {"x": x, "w": w}
        for (out, like), wanted in zip(blocks.items(), wants, strict=True):
            if wanted:
                made[out] = like.new_empty(like.shape)
                steps += [(out, start, length) for start, length in panels.slices]

        def fetch(step: int) -> Pending:
            out, start, length = steps[step]
            operand: Operand = "w" if out == "x" else "x"
            whole = kept[1] if out == "x" else kept[0]
            if whole is not None:
                return Pending(panels.take(whole, start, length), None)
            return start_gather(plan, mesh, operand, panels.take(blocks[operand], start, length))

        summing: dict[Operand, Pending] = {}

        def settle(step: int, piece: Pending) -> None:
            out, start, length = steps[step]
            panels.put(made[out], start, length, piece.wait())
            if step + 1 == len(steps) or steps[step + 1][0] != out:
                summing[out] = start_sum(plan, mesh, out, Pending(made[out], None))

        coming = fetch(0) if steps else None
        dy_whole = coming_dy.wait()
        leaving: Pending | None = None
        for step, (out, _, _) in enumerate(steps):
            assert coming is not None
            arrived = coming.wait()
            coming = fetch(step + 1) if step + 1 < len(steps) else None
            a, b = factors(out, {"y": dy_whole, "w": arrived, "x": arrived})
            partial = a @ b
            before, leaving = leaving, start_scatter(plan, mesh, out, partial)
            if before is not None:
                settle(step - 1, before)
        if leaving is not None:
            settle(len(steps) - 1, leaving)
        return (
            summing["x"].wait() if "x" in summing else None,
            summing["w"].wait() if "w" in summing else None,
        )

    def cost(self, plan: MatmulPlan, query: CostQuery) -> Cost:
        sizes, mesh, phases, keep = query.sizes, query.mesh, query.phases, query.keep
        cost = CostBuilder(mesh, query.itemsize)
        local = {operand: plan.local_sizes(operand, sizes, mesh) for operand in ("x", "w", "y")}
        panels = Panels.of(plan, mesh, local["x"][plan.k], local["w"][plan.k])
        rows: dict[Operand, int] = {"x": local["x"][plan.m], "w": local["w"][plan.n]}

        def leave(phase: Phase, operand: Operand, name: str, elements: int) -> int:
            return cost.scatter(phase, name, [axis for _, axis in plan.extras(operand)], elements)

        def product(phase: Phase, operand: Operand, out: Operand) -> None:
            for _, length in panels.slices:
                if operand not in keep:
                    start = rows[operand] * panels.per_block[operand] * length
                    cost.gather(phase, operand, [axis for _, axis in reversed(plan.extras(operand))], start)
                leave(phase, out, f"d{out}", rows[out] * panels.count * length)
            cost.add(phase, "all_reduce", f"d{out}", plan.sums(out), math.prod(local[out].values()))

        if "forward" in phases:
            for _ in range(panels.count):
                for operand, axes in panels.axes.items():
                    cost.add("forward", "broadcast", operand, axes, rows[operand] * panels.width)
            left = leave("forward", "y", "y", rows["x"] * rows["w"])
            cost.add("forward", "all_reduce", "y", plan.sums("y"), left)
        if "dx" in phases or "dw" in phases:
            phase: Phase = "dx" if "dx" in phases else "dw"
            cost.gather(phase, "dy", [axis for _, axis in reversed(plan.extras("y"))], math.prod(local["y"].values()))
        if "dx" in phases:
            product("dx", "w", "x")
        if "dw" in phases:
            product("dw", "x", "w")
        return cost.done()
