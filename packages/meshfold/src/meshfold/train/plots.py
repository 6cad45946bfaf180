"""Curves as PNG files, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[int, float]]
_MANY = 50  # with this many points, also draw a running average
_KEPT = 0.9  # decay of the running average per point


def can_plot() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_loss(path: Path, curves: Mapping[str, Curve], title: str) -> None:
    """Draw loss over steps; needs matplotlib.

    Args:
        path: the PNG to write.
        curves: label to points (step, loss). The first is drawn as a line, with a running average over it where it
            has many points; the others as dots.
        title: above the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display and no pyplot state
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (label, curve) in enumerate(curves.items()):
        if not curve:
            continue
        steps, losses = zip(*curve, strict=True)
        if number:
            # Open circles leave the first curve's line visible.
            axes.plot(steps, losses, "o", markersize=5, fillstyle="none", zorder=4, label=label)
            continue
        # Label the measured loss: the average lags behind it and differs from the circles while the loss falls.
        axes.plot(steps, losses, linewidth=1.2, label=label)
        if len(losses) >= _MANY:
            average = _smooth(losses)
            axes.plot(steps, average, "--", color="0.35", linewidth=1.0, label=f"{label}, running average")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return an exponential running mean with bias correction (Kingma and Ba, arXiv 1412.6980, section 3)."""
    found, mean = [], 0.0
    for count, value in enumerate(values, 1):
        mean = _KEPT * mean + (1 - _KEPT) * value
        found.append(mean / (1 - _KEPT**count))
    return found
