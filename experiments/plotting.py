"""Style of all plots: readable at the width of a phone, on a white page and on a dark one.

Backgrounds are transparent, ink and colours are of middle lightness, panels stand one below another, lines are named at their ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTH = 5.4
"""of a figure, in inches: on a phone of 390 pixels a font size is then as many pixels"""
INK = "#777777"
BLUE, GREEN, RED, BROWN, PURPLE, GREY = "#3f7fd0", "#2f9a68", "#cf4b55", "#b5802e", "#a06cc4", "#808080"
_GAP = 13.5  # between the middles of two labels, in points


@contextmanager
def style() -> Iterator[Any]:
    """Give pyplot for plots that no window shows, in the common style while the context lasts.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(settings()):
        yield plt


def settings() -> dict[Any, Any]:  # matplotlib types the keys as a literal of all their names
    """Return the style as matplotlib's settings."""
    inks = (
        "text.color",
        "axes.edgecolor",
        "axes.labelcolor",
        "axes.titlecolor",
        "xtick.color",
        "ytick.color",
    )
    found: dict[str, Any] = dict.fromkeys(inks, INK)
    found |= {"font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.titlepad": 8}
    found |= {"grid.color": INK, "grid.alpha": 0.3, "axes.grid": True, "axes.axisbelow": True}
    found |= {"axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none"}
    return found | {"figure.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False}


def save(plt: Any, figure: Any, file: Path) -> None:
    """Write a figure, sharp enough for a phone, and close it."""
    figure.savefig(file, dpi=200, metadata={"Software": None})
    plt.close(figure)


def name_lines(axes: Any, height: float, lines: Sequence[tuple[float, str, str]]) -> None:
    """Write names on the right of the axes, none on another. Call it when the limits of the axes are final.

    Args:
        axes: the axes.
        height: their height in inches.
        lines: (y of the line's end in data, name, colour) of each; a name may have several lines of text.
    """
    ends = sorted((_share(axes, y), name, colour) for y, name, colour in lines)
    gap = _GAP / 72 / height
    rows = [gap * (1 + name.count("\n")) for _, name, _ in ends]
    middles = [end for end, _, _ in ends]
    for _ in range(200):  # two neighbours that are too close give way by as much each
        for i in range(len(ends) - 1):
            short = (rows[i] + rows[i + 1]) / 2 - (middles[i + 1] - middles[i])
            if short > 1e-6:
                middles[i] -= short / 2
                middles[i + 1] += short / 2
    for (_, name, colour), middle in zip(ends, middles, strict=True):
        axes.annotate(
            name,
            (1.015, middle),
            xycoords="axes fraction",
            color=colour,
            va="center",
            annotation_clip=False,
            fontsize=9.5,
            weight="bold",
        )


def _share(axes: Any, y: float) -> float:
    """Return where a value is on the axis, from 0 at the bottom to 1 at the top."""
    return float(axes.transAxes.inverted().transform(axes.transData.transform((axes.get_xlim()[0], y)))[1])
