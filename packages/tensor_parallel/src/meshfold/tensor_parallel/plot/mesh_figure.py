"""Picture of a mesh: ranks as discs in a grid, the groups along an axis joined and in one colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from meshfold.mesh import Mesh
from meshfold.tensor_parallel.plot.paint import FAINT, INK, MONO, Color, Point, color, disc, new_figure, tint


def mesh_figure(mesh: Mesh, axes: Sequence[tuple[str, ...]]) -> Figure:
    """Draw a mesh, see :func:`meshfold.tensor_parallel.plot.figures.draw_mesh`."""
    places = _places(mesh)
    width = max(x for x, _ in places.values()) + 1.0
    height = max(y for _, y in places.values()) + 1.0
    columns = max(1, min(len(axes), int(19 // (width + 1.1))))
    rows = math.ceil(len(axes) / columns)
    inch = 0.62
    figure = new_figure((columns * (width + 1.1) * inch, rows * (height + 1.5) * inch))
    for number, chosen in enumerate(axes):
        canvas = figure.add_axes(
            (number % columns / columns, 1 - (number // columns + 1) / rows, 1 / columns, 1 / rows)
        )
        canvas.set(xlim=(-1.05, width + 0.05), ylim=(height + 0.1, -1.4), aspect="equal")
        canvas.set_axis_off()
        _paint_mesh(canvas, mesh, chosen, places)
    return figure


def _paint_mesh(canvas: Axes, mesh: Mesh, chosen: tuple[str, ...], places: dict[int, Point]) -> None:
    groups = mesh.groups(*chosen)
    for number, ranks in enumerate(groups):
        shade = color(number, len(groups))
        for before, after in pairwise(ranks):
            _link(canvas, places[before], places[after], shade)
        for rank in ranks:
            disc(canvas, places[rank], 0.33, rank, shade, f"{'-'.join(chosen)}-{rank}")
    names = mesh.names
    left = min(x for x, _ in places.values())
    if len(names) > 1:
        for row in range(mesh.axes[names[-2]]):
            y = places[row * mesh.axes[names[-1]]][1]
            canvas.text(
                left - 0.55, y, f"{names[-2]} {row}", ha="right", va="center", fontsize=7, color=FAINT
            )
    for column in range(mesh.axes[names[-1]] if names else 0):
        x, y = places[column]
        canvas.text(x, y - 0.52, f"{names[-1]} {column}", ha="center", va="bottom", fontsize=7, color=FAINT)
    across = mesh.size(*names[-2:])
    if len(names) > 2:
        for block in range(mesh.world_size // across):
            at = mesh.coordinates(block * across)
            words = "  ".join(f"{name} {at[name]}" for name in names[:-2])
            x, y = places[block * across]
            canvas.text(x - 0.4, y - 0.95, words, ha="left", va="bottom", fontsize=8, color=INK)
    label = ", ".join(f'"{axis}"' for axis in chosen)
    canvas.text(
        left - 0.4, -1.3, f"mesh.groups({label})", ha="left", va="top", fontsize=9, family=MONO, color=INK
    )


def _places(mesh: Mesh) -> dict[int, Point]:
    """Return the position of each rank: the last axis to the right, the one before it down, blocks of these side by side."""
    names = mesh.names
    columns = mesh.axes[names[-1]] if names else 1
    rows = mesh.axes[names[-2]] if len(names) > 1 else 1
    found = {}
    for rank in range(mesh.world_size):
        block, rest = divmod(rank, rows * columns)
        row, column = divmod(rest, columns)
        found[rank] = (0.5 + column + block * (columns + 0.9), 0.5 + row)
    return found


def _link(canvas: Axes, a: Point, b: Point, shade: Color) -> None:
    """Draw a band between neighbours, a thin arc between ranks that stand apart."""
    near = math.dist(a, b) < 1.5
    curve, width = ("arc3,rad=0", 5.0) if near else ("arc3,rad=0.25", 1.3)
    canvas.add_patch(
        FancyArrowPatch(
            a, b, arrowstyle="-", connectionstyle=curve, linewidth=width, color=tint(shade, 0.5), zorder=1
        )
    )
