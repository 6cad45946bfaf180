"""Elements of pictures: colours, discs for ranks, arrows for collectives. Imports matplotlib.

Backgrounds are transparent and line colours of medium lightness, so pictures are readable on white and on dark pages.
"""

from __future__ import annotations

import colorsys
import io
import math

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch

from meshfold.tensor_parallel.plot.figures import Box

Color = tuple[float, float, float]
Fill = tuple[float, float, float, float]
Point = tuple[float, float]

_PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#4fb0ab", "#d8ae2c", "#9c755f")
INK, FAINT, INK_ON_LIGHT = "#777777", "#808080", "#222222"
PAPER = (0.5, 0.5, 0.55, 0.1)
"""Default fill: red, green, blue, opacity."""
MONO = "DejaVu Sans Mono"


def color(number: int, count: int) -> Color:
    """Return the colour of item ``number`` of ``count``."""
    if count <= len(_PALETTE):
        return to_rgb(_PALETTE[number])
    return colorsys.hls_to_rgb(number / count, 0.5 if number % 2 else 0.58, 0.55)


def mix(a: Color, b: Color, share: float) -> Color:
    """Return a colour between two others."""
    red, green, blue = (x + (y - x) * share for x, y in zip(a, b, strict=True))
    return red, green, blue


def tint(base: Color, share: float) -> Color:
    """Return a colour mixed with white."""
    return mix(base, (1.0, 1.0, 1.0), share)


def veil(base: Color, opacity: float) -> Fill:
    """Return a translucent colour."""
    return *base, opacity


class Picture(Figure):
    """Figure that a notebook shows: matplotlib's own is shown there only after ``%matplotlib inline``."""

    def _repr_png_(self) -> bytes:
        """Return the picture that Jupyter shows."""
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=80, metadata={"Software": None})
        return file.getvalue()


def new_figure(size: Point) -> Picture:
    """Return a figure of a size in inches, with a transparent background, without pyplot and its state."""
    figure = Picture(figsize=size, dpi=150, facecolor="none")
    FigureCanvasAgg(figure)
    return figure


def rectangle_of(box: Box, corner: Point) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a box in a unit square at a corner."""
    return corner[0] + float(box.left), corner[1] + float(box.top), float(box.width), float(box.height)


def moved(point: Point, right: float, down: float) -> Point:
    """Return a point, shifted."""
    return point[0] + right, point[1] + down


def spread(x: float, y: float, width: float, height: float, count: int) -> list[tuple[Point, float]]:
    """Return centres and a radius for a number of discs in a block."""
    columns = max(1, min(count, round(math.sqrt(count * width / height))))
    rows = math.ceil(count / columns)
    cell_x, cell_y = width / columns, height / rows
    radius = min(0.085, 0.36 * min(cell_x, cell_y))
    close_x, close_y = min(cell_x, 2.6 * radius), min(cell_y, 2.6 * radius)
    left = x + width / 2 - close_x * (columns - 1) / 2
    top = y + height / 2 - close_y * (rows - 1) / 2
    return [((left + close_x * (i % columns), top + close_y * (i // columns)), radius) for i in range(count)]


def disc(canvas: Axes, centre: Point, radius: float, number: int, shade: Color, gid: str) -> None:
    """Draw a rank. ``gid`` identifies it, so that a test can check the drawing."""
    canvas.add_patch(Circle(centre, radius, facecolor=shade, edgecolor="white", linewidth=0.8, zorder=4, gid=gid))
    if radius > 0.02:
        size = min(9.0, radius * 105) if radius < 0.2 else 10.0
        canvas.text(
            *centre,
            str(number),
            ha="center",
            va="center_baseline",
            fontsize=size,
            color="white",
            zorder=7,
            weight="bold",
        )


def arrow(canvas: Axes, start: Point, end: Point, shade: str) -> None:
    """Draw a collective along a dim."""
    canvas.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="<->", mutation_scale=9, linewidth=1.3, color=shade, shrinkA=0, shrinkB=0
        )
    )
