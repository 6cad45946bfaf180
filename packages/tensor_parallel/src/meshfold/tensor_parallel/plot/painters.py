"""Pictures of a mesh, ranks as discs in a grid, and of a sharded matmul: its cube with the blocks of x, w and y around it.

Every rank has its colour. A tensor is a square, cut into its blocks; a disc with a number is a rank that holds the block. x is left
of y and w above it, so corresponding rows and columns are aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

from meshfold.mesh import Layout, Mesh
from meshfold.tensor_parallel.plan import MatmulPlan
from meshfold.tensor_parallel.plot.figures import Box, holders, matmul_layout, rank_block
from meshfold.tensor_parallel.plot.paint import (
    FAINT,
    INK,
    INK_ON_LIGHT,
    MONO,
    PAPER,
    Color,
    Point,
    arrow,
    color,
    disc,
    mix,
    moved,
    new_figure,
    rectangle_of,
    spread,
    tint,
    veil,
)

_MOVES = {"all_gather": "#3f7fd0", "reduce_scatter": "#d2601a", "all_reduce": "#a06cc4"}
_NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}
_GAP = 0.42  # between the squares: room for names and arrows


def matmul_figure(plans: Sequence[tuple[str, MatmulPlan]], mesh: Mesh, rank: int, title: str = "") -> Figure:
    """Draw matmuls, see :func:`meshfold.tensor_parallel.plot.figures.draw_matmul`."""
    side, moves, head, foot = 4.9, 1.05, 0.42 if title else 0.1, 0.4  # inches
    whole = head + len(plans) * (side + moves) + foot
    figure = new_figure((side, whole))
    if title:
        figure.text(0.5, 1 - 0.24 / whole, title, ha="center", va="center", fontsize=13, color=INK, weight="bold")
    for number, (note, plan) in enumerate(plans):
        bottom = whole - head - number * (side + moves) - side
        canvas = figure.add_axes((0, bottom / whole, 1, side / whole))
        canvas.set(xlim=(-0.4, 2.84), ylim=(2.84, -0.4), aspect="equal")
        canvas.set_axis_off()
        _paint_matmul(canvas, plan, mesh, rank, note, f"m{number}")
        _write_moves(figure, plan, mesh, bottom, whole)
    words = (
        f"a disc: a rank that holds the block      outlined: rank {rank}'s block at rest\n"
        f"hatched: the x and w that rank {rank} multiplies, the y that it computes"
    )
    figure.text(0.5, 0.19 / whole, words, ha="center", va="center", fontsize=7.5, color=FAINT, linespacing=1.4)
    return figure


def _paint_matmul(canvas: Axes, plan: MatmulPlan, mesh: Mesh, rank: int, words: str, name: str) -> None:
    near, far = 0.0, 1.0 + _GAP
    corners = {"x": (near, far), "w": (far, near), "y": (far, far)}
    _paint_cube(canvas, plan, mesh, (0.12, 0.02), 0.95)
    canvas.text(near, -0.19, "who multiplies what", fontsize=8, ha="left", va="bottom", color=FAINT)
    for operand, corner in corners.items():
        layout: Layout = getattr(plan, operand)
        _paint_tensor(canvas, f"{name}-{operand}", layout, matmul_layout(plan, operand), mesh, rank, corner)
        note = {"x": "", "w": words, "y": ""}[operand]
        x, y = corner
        canvas.text(x, y - 0.05, operand, fontsize=12, weight="bold", ha="left", va="bottom", color=INK)
        canvas.text(x + 0.12, y - 0.055, str(layout), fontsize=8, family=MONO, ha="left", va="bottom", color=INK)
        if note:
            canvas.text(x, y - 0.19, note, fontsize=8, ha="left", va="bottom", color=FAINT)
        _paint_moves(canvas, plan, operand, corner, rank_block(matmul_layout(plan, operand), mesh, rank), mesh)


def _paint_tensor(canvas: Axes, name: str, layout: Layout, work: Layout, mesh: Mesh, rank: int, corner: Point) -> None:
    """Draw the blocks at rest with the ranks that hold them, and highlight the shard and the working block of one rank.

    Discs are called ``name-rank``.
    """
    blocks = holders(layout, mesh)
    small = min(float(min(box.height, box.width)) for box in blocks)
    gap = min(0.012, small * 0.06)
    for box, ranks in blocks.items():
        x, y, width, height = rectangle_of(box, corner)
        alone = len(ranks) == 1
        fill = veil(color(ranks[0], mesh.world_size), 0.28) if alone else PAPER
        canvas.add_patch(
            FancyBboxPatch(
                (x + gap, y + gap),
                width - 2 * gap,
                height - 2 * gap,
                boxstyle=f"round,pad=0,rounding_size={min(0.03, small / 6)}",
                facecolor=fill,
                edgecolor="#a0a4aa",
                linewidth=0.7,
            )
        )
        for at, holder in zip(spread(x, y, width, height, len(ranks)), ranks, strict=True):
            (centre, radius) = at
            disc(canvas, centre, radius, holder, color(holder, mesh.world_size), f"{name}-{holder}")
    shade = mix(color(rank, mesh.world_size), (0.0, 0.0, 0.0), 0.12)
    hatched: dict[str, Any] = dict(edgecolor=veil(shade, 0.4), hatch="////", linewidth=0, zorder=3)
    dashed: dict[str, Any] = dict(edgecolor=shade, linewidth=1.1, linestyle=(0, (4, 2)), zorder=5)
    solid: dict[str, Any] = dict(edgecolor=shade, linewidth=2.6, zorder=6)
    for held, style in ((work, hatched), (work, dashed), (layout, solid)):
        x, y, width, height = rectangle_of(rank_block(held, mesh, rank), corner)
        canvas.add_patch(Rectangle((x, y), width, height, facecolor="none", **style))


def _paint_moves(canvas: Axes, plan: MatmulPlan, operand: str, corner: Point, work: Box, mesh: Mesh) -> None:
    """Draw arrows next to a tensor for forward's gathers and scatters along its dims, and the sum below y."""
    down, across = (dim for dim in getattr(plan, operand))
    x, y, width, height = rectangle_of(work, corner)
    name = "reduce_scatter" if operand == "y" else "all_gather"
    for dim in (down, across):
        axes = [axis for d, axis in plan.extras(operand) if d == dim and mesh.size(axis) > 1]  # type: ignore[arg-type]
        if not axes:
            continue
        words, shade = f"{_NAMES[name]} over {', '.join(axes)}", _MOVES[name]
        if dim == across:
            below = operand != "w"
            level = corner[1] + 1.07 if below else corner[1] - (0.36 if operand == "w" else 0.1)
            arrow(canvas, (x, level), (x + width, level), shade)
            middle = min(max(x + width / 2, corner[0] + 0.42), corner[0] + 0.6)
            canvas.text(middle, level + 0.045, words, ha="center", va="top", fontsize=8, color=shade)
        else:
            left = operand == "x"
            level = corner[0] - 0.07 if left else corner[0] + 1.07
            arrow(canvas, (level, y), (level, y + height), shade)
            shift = -0.045 if left else 0.045
            middle = min(max(y + height / 2, corner[1] + 0.42), corner[1] + 0.6)
            canvas.text(
                level + shift,
                middle,
                words,
                rotation=90,
                ha="right" if left else "left",
                va="center",
                fontsize=8,
                color=shade,
            )
    sums = [axis for axis in plan.sums("y") if mesh.size(axis) > 1]
    if operand == "y" and sums:
        arrows = any(dim == across for dim, axis in plan.extras("y") if mesh.size(axis) > 1)
        level, words = corner[1] + (1.19 if arrows else 1.06), f"all-reduce over {', '.join(sums)}"
        canvas.text(corner[0] + 0.5, level, words, ha="center", va="top", fontsize=8, color=_MOVES["all_reduce"])


def _write_moves(figure: Figure, plan: MatmulPlan, mesh: Mesh, top: float, whole: float) -> None:
    """Write every collective of more than one rank, as the plan prints it, up to a height in inches."""
    size = 7.6
    for line, phase in enumerate(("forward", "dx", "dw")):
        y = (top - 0.12 - 0.32 * line) / whole
        moves = [move for move in plan.collectives if move.phase == phase and mesh.size(*move.axes) > 1]
        figure.text(0.045, y, phase, fontsize=size, weight="bold", va="center", color=INK)
        words = ";  ".join(map(str, moves)) or "no communication"
        if len(words) > 66 and len(moves) > 1:
            half = math.ceil(len(moves) / 2)
            words = ";\n".join(";  ".join(map(str, part)) for part in (moves[:half], moves[half:]))
        figure.text(0.17, y, words, fontsize=size, va="center", color=INK, linespacing=1.25)


def _paint_cube(canvas: Axes, plan: MatmulPlan, mesh: Mesh, corner: Point, size: float) -> None:
    """Draw the cube of multiplications m × k × n, one brick per rank: y's face in front, w's on top, x's at the left.

    m points down, n right, and k into the page, drawn as up and left.
    """
    counts = {dim: mesh.size(*axes) for dim, axes in plan.compute.items()}
    front, depth, gap = size * 0.62, size * 0.38, min(0.07, 0.25 / max(counts.values()))
    origin = (corner[0] + depth, corner[1] + depth)

    def at(m: float, k: float, n: float) -> Point:
        return origin[0] + n * front - k * depth, origin[1] + m * front - k * depth

    bricks: dict[tuple[int, int, int], int] = {}
    for rank in reversed(range(mesh.world_size)):
        place = {dim: mesh.index(*axes, rank=rank) for dim, axes in plan.compute.items()}
        bricks[place[plan.m], place[plan.k], place[plan.n]] = rank
    blocks = (counts[plan.m], counts[plan.k], counts[plan.n])
    for m, k, n in _far_to_near(*blocks):
        shade = color(bricks[m, k, n], mesh.world_size)
        (m0, m1), (k0, k1), (n0, n1) = (
            (i / b + (gap / 2 if i else 0), (i + 1) / b - (gap / 2 if i + 1 < b else 0))
            for i, b in zip((m, k, n), blocks, strict=True)
        )
        faces = (
            ([at(m0, k0, n0), at(m0, k0, n1), at(m0, k1, n1), at(m0, k1, n0)], tint(shade, 0.45)),
            (
                [at(m0, k0, n0), at(m1, k0, n0), at(m1, k1, n0), at(m0, k1, n0)],
                mix(shade, (0.0, 0.0, 0.0), 0.2),
            ),
            ([at(m0, k0, n0), at(m0, k0, n1), at(m1, k0, n1), at(m1, k0, n0)], tint(shade, 0.12)),
        )
        for points, fill in faces:
            canvas.add_patch(Polygon(points, closed=True, facecolor=fill, edgecolor="white", linewidth=0.6))
        if k == 0:
            centre = at((m0 + m1) / 2, k0, (n0 + n1) / 2)
            number = "white"
        elif m == 0:
            centre = at(m0, (k0 + k1) / 2, (n0 + n1) / 2)
            number = INK_ON_LIGHT
        elif n == 0:
            centre = at((m0 + m1) / 2, (k0 + k1) / 2, n0)
            number = "white"
        else:
            continue  # hidden behind the others
        if max(blocks) > 16:
            continue  # too small for a number
        canvas.text(
            *centre,
            str(bricks[m, k, n]),
            ha="center",
            va="center",
            fontsize=_number_size(blocks),
            color=number,
        )
    for point, name, ha, va in (
        (moved(at(0.5, 0, 1), 0.05, 0), plan.m, "left", "center"),
        (moved(at(1, 0, 0.5), 0, 0.04), plan.n, "center", "top"),
        (moved(at(1, 0.5, 0), -0.04, 0.03), plan.k, "right", "top"),
    ):
        canvas.text(*point, name, ha=ha, va=va, fontsize=9, style="italic", color=FAINT)


def _far_to_near(m: int, k: int, n: int) -> Iterator[tuple[int, int, int]]:
    for far, low, right in product(reversed(range(k)), reversed(range(m)), reversed(range(n))):
        yield low, far, right


def _number_size(blocks: tuple[int, int, int]) -> float:
    return max(3.5, 10 - 1.1 * max(blocks))


def mesh_figure(mesh: Mesh, axes: Sequence[tuple[str, ...]]) -> Figure:
    """Draw a mesh, see :func:`meshfold.tensor_parallel.plot.figures.draw_mesh`."""
    places = _places(mesh)
    width = max(x for x, _ in places.values()) + 1.0
    height = max(y for _, y in places.values()) + 1.0
    columns = max(1, min(len(axes), int(10 // (width + 1.1))))  # keeps the words legible on a phone
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
            canvas.text(left - 0.55, y, f"{names[-2]} {row}", ha="right", va="center", fontsize=7, color=FAINT)
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
    canvas.text(left - 0.4, -1.3, f"mesh.groups({label})", ha="left", va="top", fontsize=9, family=MONO, color=INK)


def _places(mesh: Mesh) -> dict[int, Point]:
    """Return each rank's position: the last axis goes right, the one before it down, blocks of these side by side."""
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
    """Draw a band between neighbours, or a thin arc between distant ranks."""
    near = math.dist(a, b) < 1.5
    curve, width = ("arc3,rad=0", 5.0) if near else ("arc3,rad=0.25", 1.3)
    canvas.add_patch(
        FancyArrowPatch(a, b, arrowstyle="-", connectionstyle=curve, linewidth=width, color=veil(shade, 0.5), zorder=1)
    )
