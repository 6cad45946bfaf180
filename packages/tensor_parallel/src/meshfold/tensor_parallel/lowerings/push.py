"""The push lowering: copy engines gather and scatter rows during products of the rows that have arrived.

It carries out plans that gather only x, or scatter only y, along rows over one axis: the column and row layers of mode 1d with a
stream split by tokens. NCCL takes multiprocessors from simultaneous products, a copy engine takes none. Parts of a sum are sent in
their own dtype and added in float32, which rounds once. The collectives and their bytes equal the gather lowering's, which also
handles ranks that cannot push to each other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor

from meshfold.mesh import Group, Mesh, Pending
from meshfold.mesh.collectives import note_call
from meshfold.mesh.collectives.push import Channel, channel
from meshfold.mesh.processes import running_world
from meshfold.tensor_parallel.lowerings import push_products as products
from meshfold.tensor_parallel.lowerings.common import Pair
from meshfold.tensor_parallel.lowerings.gather import Gather, start_sum
from meshfold.tensor_parallel.plan import MatmulPlan


class Push(Gather):
    """Products of rows as they arrive, and of rows that are sent at the same time; the same collectives, pushed.

    Where nothing can be pushed, it is the gather lowering.
    """

    def refuses(self, plan: MatmulPlan) -> str:
        """Return a reason for plans that gather or scatter anything but the rows of x or y over one axis."""
        if not plan.steps("w") and [*plan.steps("x"), *plan.steps("y")] in ([(0, axis)] for axis in _axes(plan)):
            return ""
        return "only the rows of x or of y, over one axis, are pushed, and this plan moves something else or nothing"

    def prepare(self, plan: MatmulPlan, mesh: Mesh) -> None:
        """Make the group known to compiled graphs, if processes are running."""
        [axis] = _axes(plan)
        if running_world() is not None and not mesh.is_closed:
            products.remember(mesh.group(axis))

    def forward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, keep: frozenset[str]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        group, column = _group(plan, mesh), bool(plan.steps("x"))
        if keep or group.size == 1:
            return super().forward(plan, mesh, x, w, keep)
        size = x.numel() if column else x.shape[0] // group.size * w.shape[0]
        if torch.compiler.is_compiling():
            _note(group, x, w, column)
            operation = torch.ops.meshfold.push_gather_product if column else torch.ops.meshfold.push_scatter_product
            y: Tensor = operation(x, w, True, group.name, group.size)
        else:
            found = channel(group, x.device, size * x.element_size())
            if found is None:
                return super().forward(plan, mesh, x, w, keep)
            with _note(group, x, w, column):
                product = products.gather_product if column else products.scatter_product
                y = product(found, x.contiguous(), w.t())
        return start_sum(plan, mesh, "y", Pending(y, None)).wait(), None, None

    def backward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, dy: Tensor, *, wants: tuple[bool, bool], kept: Pair
    ) -> Pair:
        group, column = _group(plan, mesh), bool(plan.steps("x"))
        if kept != (None, None) or group.size == 1:
            return super().backward(plan, mesh, x, w, dy, wants=wants, kept=kept)
        found: Channel | None = None
        if not torch.compiler.is_compiling():
            found = channel(group, x.device, (x if column else dy).numel() * x.element_size())
            if found is None:
                return super().backward(plan, mesh, x, w, dy, wants=wants, kept=kept)
        dx, dw = _gradients(found, group, x, w, dy, column, wants)
        if dx is not None:
            dx = start_sum(plan, mesh, "x", Pending(dx, None)).wait()
        if dw is not None:
            dw = start_sum(plan, mesh, "w", Pending(dw, None)).wait()
        return dx, dw


def _axes(plan: MatmulPlan) -> list[str]:
    return [axis for _, axis in (*plan.steps("x"), *plan.steps("y"))]


def _group(plan: MatmulPlan, mesh: Mesh) -> Group:
    return mesh.group(*_axes(plan))


def _note(group: Group, x: Tensor, w: Tensor, column: bool) -> AbstractContextManager[object]:
    """Report a forward's collective, and return the context in which it runs."""
    running = ExitStack()
    if column:
        call = note_call("all_gather", group, x, times=group.size, detail=0, later=True)
    else:
        call = note_call("reduce_scatter", group, _of_shape(x, x.shape[0], w.shape[0]), detail=0, later=True)
    if call is not None:
        running.enter_context(call)
    return running


def _gradients(
    found: Channel | None, group: Group, x: Tensor, w: Tensor, dy: Tensor, column: bool, wants: tuple[bool, bool]
) -> Pair:
    """Compute both gradients over a channel; without one as an operation of a compiled graph."""
    calls = []
    if not column:
        calls.append(note_call("all_gather", group, dy, times=group.size, detail=0, later=True))
    if column and wants[1]:
        calls.append(note_call("all_gather", group, x, times=group.size, detail=0, later=True))
    if column and wants[0]:
        whole = _of_shape(x, group.size * x.shape[0], x.shape[1])
        calls.append(note_call("reduce_scatter", group, whole, detail=0, later=True))
    if found is None:
        operation = torch.ops.meshfold.push_gradients
        dx, dw = operation(x, w, dy, column, wants[0], wants[1], group.name, group.size)
        return dx if wants[0] else None, dw if wants[1] else None
    with ExitStack() as running:
        for call in calls:
            if call is not None:
                running.enter_context(call)
        product = products.column_gradients if column else products.row_gradients
        return product(found, x.contiguous(), w, dy.contiguous(), wants)


def _of_shape(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return a tensor of this shape and the dtype of x that takes no memory: for a record."""
    return x.new_empty(()).expand(rows, columns)
