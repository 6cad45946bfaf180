"""The plots, from the counts alone. Needs matplotlib."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.tensor_parallel_volume import isoefficiency
from experiments.tensor_parallel_volume.checks import operands
from experiments.tensor_parallel_volume.config import DEPTHS, side
from experiments.tensor_parallel_volume.published import published
from experiments.tensor_parallel_volume.records import Record, Results

COLOURS = {
    "1d": plotting.GREY,
    "1d+sequence": plotting.BROWN,
    "2d": plotting.BLUE,
    "2.5d": plotting.GREEN,
    "3d": plotting.RED,
}
MARKERS = {"1d": "o", "1d+sequence": "v", "2d": "s", "2.5d": "D", "3d": "^"}
PRINTED: dict[str, Any] = {
    "color": COLOURS["2d"],
    "marker": "s",
    "markerfacecolor": "none",
    "linestyle": (0, (1, 3)),
}
Line = tuple[str, dict[str, Any], dict[int, float]]
"""name, style, and the value by ranks"""
NAMES = {"2D, SUMMA's broadcasts as trees": "2D, SUMMA's\nbroadcasts as trees"}
WORDS = {"1d": "1D", "1d+sequence": "1D + sequence", "2d": "2D", "3d": "3D"}
DASHES = {2: "-", 4: "--", 8: ":"}
HEIGHT = 4.4


def draw(results: Results, folder: Path) -> list[Path]:
    """volume.png and isoefficiency.png.

    Raises:
        ImportError: without matplotlib.
    """
    volume, growth = folder / "volume.png", folder / "isoefficiency.png"
    with plotting.style() as plt:
        figure, (above, below) = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.9), layout="constrained")
        _linear(above, results)
        _layer(below, results)
        plotting.save(plt, figure, volume)

        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 0.9), layout="constrained")
        _growth(axes, results)
        plotting.save(plt, figure, growth)
    return [volume, growth]


def _series(records: list[Record]) -> list[tuple[str, dict[str, Any], list[Record]]]:
    """(label, style, records) a line: a mode, and for 2.5D a depth."""
    found = []
    for mode, colour in COLOURS.items():
        for depth in DEPTHS if mode == "2.5d" else (1,):
            line = [r for r in records if r.mode == mode and r.axes.get("depth", 1) == depth]
            style = {
                "color": colour,
                "marker": MARKERS[mode],
                "linestyle": DASHES.get(depth, "-"),
                "markersize": 5,
            }
            if line:
                found.append((f"{mode.upper()}, depth {depth}" if mode == "2.5d" else WORDS[mode], style, line))
    return found


def _linear(axes: Any, results: Results) -> None:
    def unit(r: Record) -> float:
        return float(r.elements() / operands(results, r)[0])

    records = results.find(what="linear", shape="square", role="column", keep="")
    lines = [(label, style, {r.ranks: unit(r) for r in line}) for label, style, line in _series(records)]
    squares = [r for r in records if r.mode == "2d" and side(r.axes)]
    printed = {r.ranks: float(published()["docs-2d"].value(q=side(r.axes))) for r in squares}
    lines.append(("2D as printed by\nColossal-AI\n(of q ranks)", PRINTED, printed))
    title = "One linear layer, forward + backward\nx, weight and result of equal size"
    _dress(axes, title, "elements that a rank sends ÷ elements of x", lines, results)


def _layer(axes: Any, results: Results) -> None:
    c = results.config
    unit = Fraction(c.tokens * c.hidden)
    records = results.find(what="layer", lowering="gather", recompute=True)
    lines = [
        (label, style, {r.ranks: float(r.elements() / unit) for r in line}) for label, style, line in _series(records)
    ]
    squares = [r for r in records if r.mode == "2d" and side(r.axes)]

    def paper(r: Record) -> float:
        names = {"P": r.ranks, "bsh": c.tokens * c.hidden, "h": c.hidden}
        forms = (published()[f"optimus-{phase}"] for phase in ("forward", "backward"))
        return float(sum((form.value(**names) for form in forms), Fraction(0)) / unit)

    lines.append(("2D as printed by\nOptimus (trees)", PRINTED, {r.ranks: paper(r) for r in squares}))
    title = f"One transformer layer with recomputation\ntokens of the batch = {c.tokens // c.hidden} × hidden size"
    _dress(axes, title, "elements that a rank sends ÷ (tokens × hidden)", lines, results)


def _dress(axes: Any, title: str, label: str, lines: list[Line], results: Results) -> None:
    """Draw lines on logarithmic axes and name them at their ends."""
    for _, style, points in lines:
        axes.plot(list(points), list(points.values()), **style)
    _by_ranks(axes, {r.ranks for r in results.find(what="layer")})
    from matplotlib.ticker import FixedLocator, NullFormatter

    bottom, top = axes.get_ylim()
    ticks = [value for value in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if bottom <= value <= top]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(title=title, xlabel="ranks", ylabel=label)
    ends = [(list(points.values())[-1], name, style["color"]) for name, style, points in lines if points]
    plotting.name_lines(axes, HEIGHT, ends)


def _by_ranks(axes: Any, ranks: set[int]) -> None:
    """Make both axes logarithmic, with a tick for every number of ranks."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(ranks), [str(p) for p in sorted(ranks)])


def _growth(axes: Any, results: Results) -> None:
    styles = {
        "1D": ("1d", "-"),
        "2D, rings": ("2d", "-"),
        "2D, SUMMA's broadcasts as trees": ("2d", "--"),
        "3D": ("3d", "-"),
    }
    ends = []
    for curve in isoefficiency.curves(results):
        if curve.name in styles:
            mode, dashes = styles[curve.name]
            x, y = list(curve.points), [float(w) for w in curve.points.values()]
            axes.plot(x, y, color=COLOURS[mode], marker=MARKERS[mode], linestyle=dashes)
            name = NAMES.get(curve.name, curve.name)
            ends.append((y[-1], f"{name}\n{curve.law}\nfit: p^{curve.exponent:.2f}", COLOURS[mode]))
    _by_ranks(axes, {r.ranks for r in results.find(what="isoefficiency")})
    axes.tick_params(axis="x", labelsize=8.5)
    axes.set(
        title="How much a problem must grow\nto keep its efficiency",
        xlabel="ranks p",
        ylabel="work ÷ work on the fewest ranks",
    )
    plotting.name_lines(axes, HEIGHT, ends)
