"""The plots, from the counts alone. Needs matplotlib."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from experiments.tensor_parallel_volume import isoefficiency
from experiments.tensor_parallel_volume.checks import operands
from experiments.tensor_parallel_volume.config import DEPTHS, side
from experiments.tensor_parallel_volume.published import published
from experiments.tensor_parallel_volume.records import Record, Results

COLOURS = {
    "1d": "#4c4c4c",
    "1d+sequence": "#b07d2b",
    "2d": "#2463a8",
    "2.5d": "#2a8f5f",
    "3d": "#b3323c",
}
MARKERS = {"1d": "o", "1d+sequence": "v", "2d": "s", "2.5d": "D", "3d": "^"}
PRINTED: dict[str, Any] = {
    "color": COLOURS["2d"],
    "marker": "s",
    "markerfacecolor": "none",
    "linestyle": (0, (1, 3)),
}
DASHES = {2: "-", 4: "--", 8: ":"}


def draw(results: Results, folder: Path) -> list[Path]:
    """volume.png and isoefficiency.png.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6.2), layout="constrained")
        _linear(left, results)
        _layer(right, results)
        volume = folder / "volume.png"
        figure.savefig(volume, dpi=130)
        plt.close(figure)

        figure, axes = plt.subplots(figsize=(7.5, 5.6), layout="constrained")
        _growth(axes, results)
        growth = folder / "isoefficiency.png"
        figure.savefig(growth, dpi=130)
        plt.close(figure)
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
                found.append((f"{mode}, depth {depth}" if mode == "2.5d" else mode, style, line))
    return found


def _linear(axes: Any, results: Results) -> None:
    def unit(r: Record) -> float:
        return float(r.elements() / operands(results, r)[0])

    records = results.find(what="linear", shape="square", role="column", keep="")
    for label, style, line in _series(records):
        axes.plot([r.ranks for r in line], [unit(r) for r in line], label=label, **style)
    squares = [r for r in records if r.mode == "2d" and side(r.axes)]
    printed = [float(published()["docs-2d"].value(q=side(r.axes))) for r in squares]
    label = "2d as Colossal-AI's table prints it (of q ranks)"
    axes.plot([r.ranks for r in squares], printed, label=label, **PRINTED)
    _dress(
        axes, "One linear layer, |X| = |W| = |Y|, forward + backward", "elements a rank sends / |X|", results
    )


def _layer(axes: Any, results: Results) -> None:
    c = results.config
    unit = Fraction(c.tokens * c.hidden)
    records = results.find(what="layer", lowering="gather", recompute=True)
    for label, style, line in _series(records):
        axes.plot([r.ranks for r in line], [float(r.elements() / unit) for r in line], label=label, **style)
    squares = [r for r in records if r.mode == "2d" and side(r.axes)]

    def paper(r: Record) -> float:
        names = {"P": r.ranks, "bsh": c.tokens * c.hidden, "h": c.hidden}
        forms = (published()[f"optimus-{phase}"] for phase in ("forward", "backward"))
        return float(sum((form.value(**names) for form in forms), Fraction(0)) / unit)

    label = "2d as Optimus prints it (trees)"
    axes.plot([r.ranks for r in squares], [paper(r) for r in squares], label=label, **PRINTED)
    title = f"One transformer layer with recomputation, b s = {c.tokens // c.hidden} h"
    _dress(axes, title, "elements a rank sends / (b s h)", results)


def _dress(axes: Any, title: str, label: str, results: Results) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({r.ranks for r in results.find(what="layer")})
    axes.set_xticks(sizes, [str(p) for p in sizes])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))  # 4, where matplotlib writes 4 × 10⁰
    axes.set(title=title, xlabel="ranks", ylabel=label)
    below = {
        "loc": "upper center",
        "bbox_to_anchor": (0.5, -0.12),
    }  # few ranks leave no room between the lines
    axes.legend(fontsize=8.5, handlelength=3.2, ncols=3, **below)


def _growth(axes: Any, results: Results) -> None:
    styles = {
        "1D": ("1d", "-"),
        "2D, rings": ("2d", "-"),
        "2D, SUMMA's broadcasts as trees": ("2d", "--"),
        "3D": ("3d", "-"),
    }
    for curve in isoefficiency.curves(results):
        if curve.name in styles:
            mode, dashes = styles[curve.name]
            label = f"{curve.name}: {curve.law}, fitted exponent {curve.exponent:.2f}"
            x, y = list(curve.points), [float(w) for w in curve.points.values()]
            axes.plot(x, y, color=COLOURS[mode], marker=MARKERS[mode], linestyle=dashes, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({r.ranks for r in results.find(what="isoefficiency")})
    axes.set_xticks(sizes, [str(p) for p in sizes])
    axes.set(
        title="How fast a problem must grow to keep its efficiency",
        xlabel="ranks p",
        ylabel="work W(p) ÷ work on the fewest ranks",
    )
    axes.legend(fontsize=9)
