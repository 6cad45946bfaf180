"""Pictures of meshes, matmuls and modes, drawn from the objects themselves; needs matplotlib (the extra ``plot``).

>>> draw_mode("2d", Mesh(dict(row=2, col=2))).savefig("2d.png")       # doctest: +SKIP
>>> draw_matmul(plan(x="m:t k", w="k n:t", y="m n:t"), Mesh(dict(t=4))) # doctest: +SKIP

Each function returns a matplotlib Figure, which a notebook shows and ``savefig`` writes. :func:`rank_block` computes the
position of a rank's block from :class:`meshfold.mesh.Placement`; the rest is drawing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import TYPE_CHECKING

from meshfold.mesh import Layout, LayoutError, Mesh, MeshfoldError, Placement
from meshfold.tensor_parallel.modes import Mode, find_mode
from meshfold.tensor_parallel.plan import MatmulPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 256
"""A picture with more than these is not readable."""

_WEIGHTS = {
    "column": "column weight: QKV, up, gate",
    "row": "row weight: out, down",
    "embedding": "embedding",
    "head": "LM head",
    "tied_head": "LM head that is the embedding",
}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Box:
    """A part of a tensor of two dims, in fractions of its height and width."""

    top: Fraction
    left: Fraction
    height: Fraction
    width: Fraction


def rank_block(layout: Layout, mesh: Mesh, rank: int) -> Box:
    """Return the part of a tensor of this layout that a rank holds; the layout has two dims, rows first."""
    counts = tuple(mesh.size(*axes) for axes in layout.values())
    place = Placement(shape=counts, axes=tuple(layout.values()))
    (top,), (left,) = (place.segments(mesh, dim, rank) for dim in (0, 1))
    rows, columns = counts
    return Box(
        top=Fraction(top[0], rows),
        left=Fraction(left[0], columns),
        height=Fraction(1, rows),
        width=Fraction(1, columns),
    )


def holders(layout: Layout, mesh: Mesh) -> dict[Box, tuple[int, ...]]:
    """Return every block of a tensor of this layout, row by row, with the ranks that hold it."""
    found: dict[Box, list[int]] = {}
    for rank in range(mesh.world_size):
        found.setdefault(rank_block(layout, mesh, rank), []).append(rank)
    return {box: tuple(found[box]) for box in sorted(found)}


def matmul_layout(plan: MatmulPlan, operand: str) -> Layout:
    """Return the layout in which ranks multiply: x and w gathered, y as partial sums before it leaves."""
    at_rest: Layout = getattr(plan, operand)
    return Layout({dim: plan.compute[dim] for dim in at_rest})


def draw_mesh(mesh: Mesh, *axes: str | Sequence[str]) -> Figure:
    """Draw the ranks of a mesh, once for each of ``axes`` (by default every axis), the groups along it in one colour.

    An entry may be several axes: ``draw_mesh(mesh, "row", ("row", "col"))``.

    Raises:
        MeshfoldError: if matplotlib is not installed, or the mesh has too many ranks to be drawn.
        LayoutError: for an axis that the mesh does not have, or a mesh without axes.
    """
    _check(mesh)
    chosen = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in axes or mesh.names]
    if not chosen:
        raise LayoutError("a mesh without axes is one rank: there is nothing to draw")
    for group in chosen:
        mesh.require(*group, what="draw_mesh")
    figure: Figure = _painters().mesh_figure(mesh, chosen)
    return figure


def draw_matmul(plan: MatmulPlan, mesh: Mesh, *, rank: int = 0) -> Figure:
    """Draw a sharded matmul: the ranks of each block of x, w and y at rest, the blocks that a rank multiplies, the messages.

    Args:
        plan: from :func:`meshfold.tensor_parallel.plan`.
        mesh: gives the sizes of the axes.
        rank: the highlighted one: blocks it holds at rest are outlined, those it multiplies with are hatched.

    Raises:
        MeshfoldError: if matplotlib is not installed, or the mesh has too many ranks to be drawn.
        LayoutError: if the mesh lacks an axis of the plan.
    """
    _check(mesh, rank)
    for layout in (plan.x, plan.w, plan.y):
        mesh.require(*layout.axes, what=f"the layout {str(layout)!r}")
    figure: Figure = _painters().matmul_figure([("", plan)], mesh, rank)
    return figure


def draw_mode(mode: str | Mode, mesh: Mesh, *, matmuls: Sequence[str] = ("column", "row"), rank: int = 0) -> Figure:
    """Draw the matmuls of a mode below each other, each as :func:`draw_matmul` does.

    Args:
        mode: a built-in mode's name or a Mode of your own.
        mesh: has the mode's axes.
        matmuls: some of column, row, embedding, head, tied_head.
        rank: the highlighted one.

    Raises:
        MeshfoldError: if matplotlib is not installed, or the mesh has too many ranks to be drawn.
        LayoutError: for an unknown mode or matmul, or a mesh that lacks an axis of the mode.
    """
    _check(mesh, rank)
    found = find_mode(mode)
    mesh.require(*found.axes, what=f"mode {found.name!r}")
    unknown = [name for name in matmuls if name not in found.plans]
    if unknown or not matmuls:
        raise LayoutError(f"matmuls={tuple(matmuls)!r}: draw some of {', '.join(found.plans)}")
    chosen = [(_WEIGHTS[name], found.plans[name]) for name in matmuls]
    figure: Figure = _painters().matmul_figure(chosen, mesh, rank, title=f"mode {found.name} on {_sizes(mesh)}")
    return figure


def _sizes(mesh: Mesh) -> str:
    return " × ".join(f"{name} {size}" for name, size in mesh.axes.items()) or "one rank"


def _check(mesh: Mesh, rank: int = 0) -> None:
    if mesh.world_size > MOST_RANKS:
        raise MeshfoldError(
            f"{mesh} has {mesh.world_size} ranks, too many for a picture: draw a smaller one, of at most {MOST_RANKS}"
        )
    if not 0 <= rank < mesh.world_size:
        raise MeshfoldError(f"rank {rank} is not in {mesh}: use 0 to {mesh.world_size - 1}")


def _painters() -> ModuleType:
    """Import the drawing module, and with it matplotlib, only when needed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MeshfoldError("pictures need matplotlib: pip install meshfold-tensor-parallel[plot]")
    return importlib.import_module("meshfold.tensor_parallel.plot.painters")
