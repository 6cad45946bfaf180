"""Redistribution: the collectives that take a tensor from one layout to another, with their adjoints and bytes.

The rules, for layouts of the same dims:

1. An axis that splits no dim any more is all-gathered, the minor axis of a dim first. Its adjoint is a reduce-scatter, because
   each rank uses the gathered tensor differently.
2. An axis that moves from one dim to another is exchanged by all-to-all; its adjoint moves it back.

Gathers come first: a dim is exchanged when what has to leave it is its minor axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from meshfold.mesh import Layout, LayoutError, Mesh, Pending, collectives
from meshfold.mesh.collectives import exchange_blocks
from meshfold.tensor_parallel import CostEntry


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of a redistribution.

    Attributes:
        kind: all_gather along ``dim``, or all_to_all from ``dim`` to ``to``.
        axes: the mesh axes, major first; one for a gather.
        dim: the dim that is whole, or less split, afterwards.
        to: the dim that the axes split afterwards.
    """

    kind: Literal["all_gather", "all_to_all"]
    axes: tuple[str, ...]
    dim: str
    to: str = ""


def steps_between(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Derive the collectives from one layout to another.

    >>> for step in steps_between(Layout.parse("q:row k:col"), Layout.parse("q:col k")):
    ...     print(step.kind, *step.axes, *filter(None, (step.dim, step.to)))
    all_gather row q
    all_to_all col k q

    Raises:
        LayoutError: if the dims differ, or the order of axes cannot be reached by these collectives.
    """
    refused = LayoutError(f"no way from layout {str(source)!r} to {str(target)!r} by all-gathers and all-to-alls")
    if list(source) != list(target) or set(target.axes) - set(source.axes):
        raise refused
    now = {dim: list(axes) for dim, axes in source.items()}
    steps: list[Step] = []
    for dim, axes in now.items():
        while axes and axes[-1] not in target.axes:
            steps.append(Step("all_gather", (axes.pop(),), dim))
    for dim, axes in now.items():
        kept = target[dim][: len(axes)]
        common = 0
        while common < len(kept) and kept[common] == axes[common]:
            common += 1
        leaving = tuple(axes[common:])
        if not leaving:
            continue
        homes = [to for to in target if to != dim and tuple(now[to]) + leaving == target[to]]
        if len(homes) != 1:
            raise refused
        steps.append(Step("all_to_all", leaving, dim, homes[0]))
        del axes[common:]
        now[homes[0]].extend(leaving)
    if any(tuple(now[dim]) != target[dim] for dim in target):
        raise refused
    return tuple(steps)


class Redistribution:
    """A bound redistribution: apply it to a tensor, turn it around, count its bytes."""

    def __init__(self, source: Layout, target: Layout, mesh: Mesh, dims: dict[str, int]) -> None:
        """Args:
        source, target: the layouts.
        mesh: where the tensor lies.
        dims: number of each named dim in the tensor.
        """
        steps = steps_between(source, target)
        self.steps = tuple(step for step in steps if mesh.size(*step.axes) > 1)
        self.mesh, self.dims = mesh, dims
        for step in self.steps:
            mesh.prepare(*step.axes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the block of the target layout. Not differentiable."""
        return self.start(x).wait()

    def start(self, x: Tensor) -> Pending:
        """Apply it and leave the last collective in flight. Not differentiable."""
        coming = Pending(x, None)
        for step in self.steps:
            coming = self._apply(step, coming.wait(), back=False)
        return coming

    def start_adjoint(self, grad: Tensor) -> Pending:
        """Return the gradient of the source's block from that of the target's; the last collective is in flight."""
        coming = Pending(grad, None)
        for step in reversed(self.steps):
            coming = self._apply(step, coming.wait(), back=True)
        return coming

    def _apply(self, step: Step, x: Tensor, *, back: bool) -> Pending:
        """Start one step on a tensor, or its adjoint on a gradient."""
        dim, mesh = self.dims[step.dim], self.mesh
        if step.kind == "all_gather":
            move = collectives.reduce_scatter if back else collectives.all_gather
            return move(x, mesh.group(*step.axes), dim, async_op=True)
        to = self.dims[step.to]
        split, joined = (dim, to) if back else (to, dim)
        if len(step.axes) == 1:
            return collectives.all_to_all(x, mesh.group(*step.axes), split, joined, async_op=True)
        return Pending(exchange_blocks(x, mesh, split, joined, step.axes), None)

    def cost(self, operand: str, block_bytes: int) -> list[CostEntry]:
        """Return every collective of forward and backward. ``block_bytes``: of the source's block."""
        entries = []
        for step in self.steps:
            size = self.mesh.size(*step.axes)
            back = "all_to_all"
            if step.kind == "all_gather":
                block_bytes *= size
                back = "reduce_scatter"
            axes = self.mesh.spanned(*step.axes)
            entries.append(CostEntry("forward", step.kind, operand, axes, size, block_bytes))
            entries.append(CostEntry("backward", back, f"d{operand}", axes, size, block_bytes))  # type: ignore[arg-type]
        return entries
