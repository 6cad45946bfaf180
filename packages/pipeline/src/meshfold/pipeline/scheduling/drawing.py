"""The picture of a schedule: a row for every rank, time from left to right, a box for every action.

The colour shows the micro-batch; forwards are light, gradients of inputs full, gradients of weights dark, both at once full with a
dark foot. If a rank holds several stages, boxes of its first stage are at the top of the row, boxes of its last at the bottom. One
list of shapes is made (:func:`scene`); SVG is written from it directly, all other formats by matplotlib.
"""

from __future__ import annotations

import colorsys
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from meshfold.mesh import MeshfoldError
from meshfold.pipeline.scheduling.actions import Op
from meshfold.pipeline.scheduling.simulation import Simulation, Timed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Color = tuple[float, float, float]

_PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#4fb0ab", "#d8ae2c", "#9c755f")
# The background is transparent; these colours are legible on white and on dark pages. _ROW ends with its opacity.
_INK, _FAINT, _INK_ON_LIGHT, _ROW = "#777777", "#808080", "#222222", "#8080801c"
_LEFT, _RIGHT, _TOP, _ROW_HEIGHT, _GAP = 58.0, 16.0, 34.0, 30.0, 4.0
_FONT = "DejaVu Sans, Verdana, sans-serif"


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A filled rectangle in pixels from the top left; ``name`` is an action's text, or the meaning of the rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Text in pixels: its middle, left or right end, vertically centred."""

    x: float
    y: float
    words: str
    size: float
    fill: str
    anchor: str = "middle"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """All shapes of a picture in drawing order, and a description in words."""

    width: float
    height: float
    shapes: tuple[Rectangle | Text, ...]
    words: str


def scene(simulation: Simulation, *, width: float = 1000.0) -> Scene:
    """Return the shapes of a simulated schedule's picture, in a frame of this size in pixels."""
    ranks = len(simulation.ranks)
    scale = (width - _LEFT - _RIGHT) / (simulation.makespan or 1.0)
    heading = textwrap.wrap(title(simulation), int((width - _RIGHT) / 7))
    start = _LEFT if len(heading) == 1 else 8.0
    shapes: list[Rectangle | Text] = [
        Text(start, 16 + 18 * line, words, 13, _INK, "start") for line, words in enumerate(heading)
    ]
    top = _TOP + 18 * (len(heading) - 1)
    for rank, timed in enumerate(simulation.ranks):
        y = top + rank * (_ROW_HEIGHT + _GAP)
        shapes.append(Rectangle(_LEFT, y, width - _LEFT - _RIGHT, _ROW_HEIGHT, _ROW, f"rank {rank}"))
        shapes.append(Text(_LEFT - 8, y + _ROW_HEIGHT / 2, f"rank {rank}", 11, _INK, "end"))
        for one in timed:
            shapes += _box(simulation, one, y, scale)
    foot = top + ranks * (_ROW_HEIGHT + _GAP)
    shapes += _axis(simulation.makespan, scale, foot, width)
    legend = list(_legend(simulation, foot + 42, width))
    shapes += legend
    words = f"{simulation.schedule}\n{title(simulation)}"
    return Scene(width=width, height=legend[-1].y + 16, shapes=tuple(shapes), words=words)


def title(simulation: Simulation) -> str:
    """Return the name, the size, and the bubble by both definitions."""
    made = simulation.schedule
    many = "micro-batch" if made.microbatches == 1 else "micro-batches"
    return (
        f"{made.name}, {made.microbatches} {many}: bubble {simulation.bubble:.1%} with a barrier after the step, "
        f"{simulation.span_bubble:.1%} in the longest span of a rank"
    )


def _box(simulation: Simulation, one: Timed, y: float, scale: float) -> Iterator[Rectangle | Text]:
    """Yield an action's rectangle, and its micro-batch number if there is room."""
    chunks = simulation.schedule.chunks
    height = _ROW_HEIGHT * (1.0 if chunks == 1 else 0.66)
    chunk = simulation.schedule.stages_of(one.rank).index(one.action.stage)
    y += (_ROW_HEIGHT - height) * (chunk / (chunks - 1) if chunks > 1 else 0)
    x, full = _LEFT + one.start * scale, (one.end - one.start) * scale
    width = max(full - min(1.0, 0.15 * full), 0.0)
    base = _color(one.action.microbatch, simulation.schedule.microbatches)
    fill = {Op.F: _mix(base, 1.0, 0.6), Op.W: _mix(base, 0.0, 0.4)}.get(one.action.op, base)
    yield Rectangle(x, y, width, height, _hex(fill), str(one.action))
    if one.action.op is Op.BW:
        yield Rectangle(x, y + 0.8 * height, width, 0.2 * height, _hex(_mix(base, 0.0, 0.4)))
    number = str(one.action.microbatch)
    size = min(11.0, 0.6 * height, 1.5 * width / len(number))
    if size >= 5:
        shade = _INK_ON_LIGHT if one.action.op is Op.F else "#ffffff"
        yield Text(x + width / 2, y + height * (0.4 if one.action.op is Op.BW else 0.5), number, size, shade)


def _axis(makespan: float, scale: float, y: float, width: float) -> Iterator[Rectangle | Text]:
    """Yield the time axis from 0 to the makespan in round steps."""
    yield Rectangle(_LEFT, y + 2, width - _LEFT - _RIGHT, 1, _FAINT, "time")
    rough = (makespan or 1.0) / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough * 0.999)
    for tick in range(int(makespan / step + 1e-9) + 1):
        x = _LEFT + tick * step * scale
        yield Rectangle(x, y + 2, 1, 4, _FAINT)
        yield Text(x, y + 14, f"{tick * step:.6g}", 10, _FAINT)
    yield Text(_LEFT - 8, y + 14, "time", 10, _FAINT, "end")


def _legend(simulation: Simulation, y: float, width: float) -> Iterator[Rectangle | Text]:
    base = _color(0, simulation.schedule.microbatches)
    there = {one.action.op for timed in simulation.ranks for one in timed}
    names = {
        Op.F: "forward",
        Op.B: "gradient of the input",
        Op.W: "gradient of the weights",
        Op.BW: "both gradients",
    }
    fills = {Op.F: _mix(base, 1.0, 0.6), Op.W: _mix(base, 0.0, 0.4)}
    x = _LEFT
    for op, name in names.items():
        if op not in there:
            continue
        if x > _LEFT and x + 46 + 6.6 * len(name) > width:
            x, y = _LEFT, y + 20
        yield Rectangle(x, y - 7, 14, 14, _hex(fills.get(op, base)))
        if op is Op.BW:
            yield Rectangle(x, y + 4.2, 14, 2.8, _hex(_mix(base, 0.0, 0.4)))
        yield Text(x + 20, y, f"{op.value}: {name}", 11, _INK, "start")
        x += 46 + 6.6 * len(name)
    words = "numbers are micro-batches"
    if x + 6.6 * len(words) > width:
        x, y = _LEFT, y + 20
    yield Text(x, y, words, 11, _FAINT, "start")


def svg(simulation: Simulation, *, width: float = 1000.0) -> str:
    """Return the picture as SVG. A box's tooltip says what runs there; the description holds the schedule as text."""
    drawn = scene(simulation, width=width)
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_px(drawn.width)}" height="{_px(drawn.height)}" '
        f'viewBox="0 0 {_px(drawn.width)} {_px(drawn.height)}" font-family="{_FONT}">',
        '<metadata><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" '
        'xmlns:cc="http://creativecommons.org/ns#" xmlns:dc="http://purl.org/dc/elements/1.1/"><cc:Work>',
        f"<dc:description>{escape(drawn.words, quote=False)}</dc:description>",
        "</cc:Work></rdf:RDF></metadata>",
    ]
    for shape in drawn.shapes:
        if isinstance(shape, Rectangle):
            where = f'x="{_px(shape.x)}" y="{_px(shape.y)}" width="{_px(shape.width)}" height="{_px(shape.height)}"'
            tip = f"><title>{escape(shape.name)}</title></rect>" if shape.name else "/>"
            lines.append(f"<rect {where} {_fill(shape.fill)}{tip}")
        else:
            where = f'x="{_px(shape.x)}" y="{_px(shape.y)}" font-size="{_px(shape.size)}" text-anchor="{shape.anchor}"'
            lines.append(
                f'<text {where} dominant-baseline="central" fill="{shape.fill}">{escape(shape.words, quote=False)}</text>'
            )
    return "\n".join([*lines, "</svg>", ""])


def figure(simulation: Simulation, *, width: float = 1000.0) -> Figure:
    """Return the picture as a matplotlib figure, made from the same shapes.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle as Patch

    drawn = scene(simulation, width=width)
    made = Figure(figsize=(drawn.width / 100, drawn.height / 100), dpi=200, facecolor="none")
    FigureCanvasAgg(made)
    canvas = made.add_axes((0, 0, 1, 1))
    canvas.set(xlim=(0, drawn.width), ylim=(drawn.height, 0))
    canvas.set_axis_off()
    sides = {"start": "left", "middle": "center", "end": "right"}
    for shape in drawn.shapes:
        if isinstance(shape, Rectangle):
            canvas.add_patch(
                Patch(
                    (shape.x, shape.y),
                    shape.width,
                    shape.height,
                    facecolor=shape.fill,
                    linewidth=0,
                    gid=shape.name or None,
                )
            )
        else:
            canvas.text(
                shape.x,
                shape.y,
                shape.words,
                fontsize=shape.size * 0.72,  # SVG units are 1/100 inch
                color=shape.fill,
                ha=sides[shape.anchor],
                va="center_baseline",
            )
    return made


def draw(simulation: Simulation, path: str | Path, *, width: float = 1000.0) -> Path:
    """Write the picture: ``.svg`` by hand, any other ending by matplotlib (the extra ``plot``).

    Raises:
        MeshfoldError: if matplotlib is needed and not installed, or the ending is one that it does not know.
    """
    target = Path(path)
    if target.suffix == ".svg":
        target.write_text(svg(simulation, width=width), encoding="utf-8")
        return target
    _check_ending(target)
    if target.suffix == ".png":
        words = scene(simulation, width=width).words
        figure(simulation, width=width).savefig(target, metadata={"Description": words, "Software": None})
    else:
        figure(simulation, width=width).savefig(target)
    return target


def _check_ending(target: Path) -> None:
    """Raise unless matplotlib is installed and supports the format."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise MeshfoldError(
            f"{target.name!r}: any picture but .svg needs matplotlib: pip install 'meshfold-pipeline[plot]'"
        ) from error
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if target.suffix.removeprefix(".") not in known:
        raise MeshfoldError(f"{target.name!r}: give a name that ends in one of .{', .'.join(known)}")


def _color(number: int, count: int) -> Color:
    """Return the colour of a micro-batch."""
    if count <= len(_PALETTE):
        text = _PALETTE[number]
        red, green, blue = (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return red, green, blue
    return colorsys.hls_to_rgb(number / count, 0.48 if number % 2 else 0.56, 0.5)


def _mix(base: Color, other: float, share: float) -> Color:
    """Mix a colour with white (1) or black (0)."""
    red, green, blue = (x + (other - x) * share for x in base)
    return red, green, blue


def _hex(color: Color) -> str:
    return "#" + "".join(f"{round(255 * x):02x}" for x in color)


def _fill(color: str) -> str:
    """Return SVG attributes for ``#rrggbb`` or ``#rrggbbaa``; not every viewer knows the latter."""
    opacity = f' fill-opacity="{_px(int(color[7:], 16) / 255)}"' if len(color) == 9 else ""
    return f'fill="{color[:7]}"{opacity}'


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
