"""The picture of axial modes: who has which part of a pair tensor, at rest and in attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle

from meshfold.folding import AXIAL_MODES, Axes
from meshfold.mesh import Layout, Mesh, Placement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MESHES = {
    "dap": dict(axial=4),
    "grid": dict(row=2, col=2),
    "grid+depth": dict(depth=2, row=2, col=2),
}
SIZE = 8


def layouts(name: str) -> list[tuple[str, Layout]]:
    """Return what is shown of a mode: a caption and the layout of the pair tensor."""
    mode = AXIAL_MODES[name]
    axes = Axes.of(Mesh(MESHES[name], rank=0), mode)
    rest = mode.layout
    if mode.attention != "exchange":
        return [("at rest", rest), ("within rows: a ring", rest), ("within columns: a ring", rest)]
    rows = Layout({"i": axes.rows + axes.columns, "j": ()})
    columns = Layout({"i": (), "j": axes.columns + axes.rows})
    moved = "as it lies" if rows == rest else "all-to-all"
    return [("at rest", rest), (f"within rows: {moved}", rows), ("within columns: all-to-all", columns)]


def description() -> str:
    """Return what the picture shows, in words that change when it should."""
    return "\n".join(
        f"{name} {sizes}: {'; '.join(f'{words} {layout}' for words, layout in layouts(name))}"
        for name, sizes in MESHES.items()
    )


def draw() -> Figure:
    """Draw a line for each mode and a square for each layout; a colour is a rank."""
    from meshfold.tensor_parallel.plot.paint import FAINT, INK, color, new_figure, veil

    figure = new_figure((4.9, 6.0))
    for line, (name, sizes) in enumerate(MESHES.items()):
        top = 1 - line / len(MESHES)
        shown = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        figure.text(0.03, top - 0.03, f"{name}", fontsize=11, weight="bold", color=INK, va="center")
        figure.text(0.97, top - 0.03, shown, fontsize=8.5, color=FAINT, va="center", ha="right")
        for number, (words, layout) in enumerate(layouts(name)):
            canvas = figure.add_axes((0.02 + number / 3 * 0.98, top - 0.285, 0.29, 0.2))
            canvas.set(xlim=(-0.1, SIZE + 0.1), ylim=(SIZE + 0.1, -0.1), aspect="equal")
            canvas.set_title(words, fontsize=7.5, color=INK, pad=3)
            canvas.set_axis_off()
            place = Placement(shape=(SIZE, SIZE), axes=tuple(layout.values()))
            world = Mesh(sizes, rank=0).world_size
            for rank in range(world):
                (row, height), (column, width) = (place.segments(Mesh(sizes), dim, rank)[0] for dim in (0, 1))
                box = Rectangle(
                    (column, row), width, height, facecolor=veil(color(rank, world), 0.75), edgecolor="white"
                )
                canvas.add_patch(box)
                middle = column + width / 2, row + height / 2
                canvas.text(*middle, str(rank), ha="center", va="center", fontsize=8, color=INK)
            canvas.text(SIZE / 2, SIZE + 0.9, str(layout), ha="center", va="center", fontsize=7, color=FAINT)
    return figure
