"""Triangle multiplication over ranks: a matmul for each channel, planned by the layout algebra.

For edges ``x[m, k]`` and ``w[n, k]`` that lie as the pair tensor does, rows over I and columns over J::

    y[m:I n:J] = Σ_k x[m:I k:J] w[n:I k:J]

:func:`meshfold.tensor_parallel.plan` derives: w is all-gathered along n over I, y is reduce-scattered along n over J; backward
all-gathers dy along n over J and w along n over I again, and reduce-scatters dw along n over I. Under ``dap`` that is one
all-gather (outgoing) or one reduce-scatter (incoming).

n may be split into steps. Each takes a thin slice of every rank's block, so the gathered operand and the partial sums are never
whole. The bytes are the same.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshfold.folding import functions
from meshfold.folding.axial.axes import Axes
from meshfold.kernels import applied, once_differentiable
from meshfold.mesh import Layout, Mesh, Pending, collectives
from meshfold.mesh.collectives import non_view_result
from meshfold.tensor_parallel import CostEntry, MatmulPlan, plan


def product_plan(axes: Axes) -> MatmulPlan:
    """Return the plan of ``y[m, n] = Σ_k x[m, k] w[n, k]`` for edges in the pair tensor's layout."""
    rows, columns = axes.rows, axes.columns
    return plan(Layout({"m": rows, "k": columns}), Layout({"k": columns, "n": rows}), Layout({"m": rows, "n": columns}))


def edge_product(axes: Axes, x: Tensor, w: Tensor) -> Tensor:
    """Return ``Σ_k x[m, k] w[n, k]`` for each channel: ``b m k c, b n k c -> b m n c``, each a block of ``rows × columns``."""
    if not axes.is_split and axes.product_steps == 1:
        return functions.multiply_edges(x, w)
    key = ("edge product", axes.rows, axes.columns, axes.product_steps)
    y: Tensor = _product(x, w, axes.mesh.once(key, lambda: EdgeProduct(axes)))
    return y


class EdgeProduct:
    """The steps of one product: its plan, and slices of n."""

    def __init__(self, axes: Axes) -> None:
        """``axes``: over which the edges lie."""
        self.mesh: Mesh = axes.mesh
        self.plan = product_plan(axes)
        self.gathered = tuple(axis for _, axis in self.plan.extras("w") if self.mesh.size(axis) > 1)
        self.scattered = tuple(axis for _, axis in self.plan.extras("y") if self.mesh.size(axis) > 1)
        self.cells_w = self.mesh.size(*self.scattered)
        self.cells_y = self.mesh.size(*self.gathered)
        self.steps = axes.product_steps
        self.plan.prepare(self.mesh)

    def slices(self, width: int) -> list[tuple[int, int]]:
        """Return (start, length) of each step within a cell of ``width`` elements of n."""
        steps = max(min(self.steps, width), 1)
        bounds = [step * width // steps for step in range(steps + 1)]
        return [(start, end - start) for start, end in pairwise(bounds)]

    def gather(self, thin: Tensor, dim: int, axes: tuple[str, ...]) -> Pending:
        """All-gather along a dim, the minor axis first; the last is left in flight."""
        coming = Pending(thin, None)
        for axis in reversed(axes):
            coming = collectives.all_gather(coming.wait(), self.mesh.group(axis), dim, async_op=True)
        return coming

    def scatter(self, partial: Tensor, dim: int, axes: tuple[str, ...]) -> Pending:
        """Reduce-scatter along a dim, the major axis first; the last is left in flight."""
        leaving = Pending(partial, None)
        for axis in axes:
            leaving = collectives.reduce_scatter(leaving.wait(), self.mesh.group(axis), dim, async_op=True)
        return leaving

    def cost(self, operand_bytes: int, width: int) -> list[CostEntry]:
        """Return every collective of forward and backward.

        Args:
            operand_bytes: of one operand's block, all channels.
            width: elements of n in a cell: the padded size over the number of ranks.
        """
        entries: list[CostEntry] = []

        def add(phase: str, kind: str, operand: str, axes: tuple[str, ...], thin: int) -> None:
            order = reversed(axes) if kind == "all_gather" else axes
            if kind == "reduce_scatter":
                thin *= self.mesh.size(*axes)
            for axis in order:
                size = self.mesh.size(axis)
                thin = thin * size if kind == "all_gather" else thin
                entries.append(CostEntry(phase, kind, operand, self.mesh.spanned(axis), size, thin))  # type: ignore[arg-type]
                thin = thin if kind == "all_gather" else thin // size

        for _, length in self.slices(width):
            thin = operand_bytes // width * length
            add("forward", "all_gather", "w", self.gathered, thin)
            add("forward", "reduce_scatter", "y", self.scattered, thin)
            add("backward", "all_gather", "dy", self.scattered, thin)
            add("backward", "all_gather", "w", self.gathered, thin)
            add("backward", "reduce_scatter", "dw", self.gathered, thin)
        return entries


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, product: EdgeProduct) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, w)
        if product.steps == 1:
            arrived = product.gather(w, 1, product.gathered).wait()
            y = product.scatter(functions.multiply_edges(x, arrived), 2, product.scattered).wait()
            return non_view_result(y.contiguous(), x)
        b, _, k, c = w.shape
        cells = w.reshape(b, product.cells_w, -1, k, c)
        width = cells.shape[2]
        y = x.new_empty(b, x.shape[1], product.cells_y, width, c)
        slices = product.slices(width)
        if len(slices) > 1:
            x = x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)  # as every step's product of matrices needs it

        def fetch(step: int) -> Pending:
            start, length = slices[step]
            return product.gather(cells[:, :, start : start + length].reshape(b, -1, k, c), 1, product.gathered)

        coming, leaving = fetch(0), None
        for step in range(len(slices)):
            arrived = coming.wait()
            if step + 1 < len(slices):
                coming = fetch(step + 1)
            before, leaving = leaving, product.scatter(functions.multiply_edges(x, arrived), 2, product.scattered)
            if before is not None:
                _put(y, slices[step - 1], before.wait())
        if leaving is not None:
            _put(y, slices[-1], leaving.wait())
        return y.view(b, x.shape[1], -1, c)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        product: EdgeProduct = ctx.product
        if product.steps == 1:
            return *_gradients(product, x, w, dy), None
        b, _, k, c = w.shape
        m = x.shape[1]
        cells = w.reshape(b, product.cells_w, -1, k, c)
        width = cells.shape[2]
        dy_cells = dy.reshape(b, m, product.cells_y, width, c)
        x_turned = x.transpose(1, 2)  # b k m c
        dx: Tensor | None = None
        dw = w.new_empty(cells.shape)
        slices = product.slices(width)

        def fetch(step: int) -> tuple[Pending, Pending]:
            start, length = slices[step]
            thin_dy = dy_cells[:, :, :, start : start + length].reshape(b, m, -1, c)
            thin_w = cells[:, :, start : start + length].reshape(b, -1, k, c)
            return product.gather(thin_dy, 2, product.scattered), product.gather(thin_w, 1, product.gathered)

        coming, leaving = fetch(0), None
        for step in range(len(slices)):
            dy_step, w_step = (pending.wait() for pending in coming)
            if step + 1 < len(slices):
                coming = fetch(step + 1)
            partial = functions.multiply_edges(dy_step.transpose(1, 2), x_turned)  # b n k c
            before, leaving = leaving, product.scatter(partial, 1, product.gathered)
            part = functions.multiply_edges(dy_step, w_step.transpose(1, 2))  # b m k c
            dx = part if dx is None else dx.add_(part)
            if before is not None:
                _put(dw, slices[step - 1], before.wait(), cells_dim=1)
        if leaving is not None:
            _put(dw, slices[-1], leaving.wait(), cells_dim=1)
        return dx, dw.view(w.shape), None


_product = applied(_Product)


def _gradients(product: EdgeProduct, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx and dw of a product in one step; dw is on its way while dx is computed."""
    coming_dy, coming_w = product.gather(dy, 2, product.scattered), product.gather(w, 1, product.gathered)
    dy, w = coming_dy.wait(), coming_w.wait()
    leaving = product.scatter(functions.multiply_edges(dy.transpose(1, 2), x.transpose(1, 2)), 1, product.gathered)
    dx = functions.multiply_edges(dy, w.transpose(1, 2))
    return dx, leaving.wait().contiguous()


def _put(out: Tensor, at: tuple[int, int], thin: Tensor, cells_dim: int = 2) -> None:
    """Write a thin slice of every cell: ``cells_dim`` is the dim of the cells in ``out``."""
    start, length = at
    window = out.narrow(cells_dim + 1, start, length)
    window.copy_(thin.reshape(window.shape))
