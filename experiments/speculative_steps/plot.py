"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.speculative_steps.claims import QWEN, WAYS

HEIGHT = 2.8
NAMES = {
    "host": "ours, on the host",
    "ahead": "ours, made ahead",
    "planned": "ours, planned",
}


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw seconds of a step of Qwen2.5-3B on two A100s, published and ours.

    Raises:
        ImportError: without matplotlib.
    """
    bars = [(row["system"], row["ms"], plotting.GREY) for row in found["published"]]
    bars += [(NAMES[way], found["plans"][QWEN][way], plotting.BLUE) for way in WAYS]
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 0.8), layout="constrained")
        at = range(len(bars))
        axes.barh(at, [value for _, value, _ in bars], color=[colour for *_, colour in bars])
        for y, (_, value, _) in zip(at, bars, strict=True):
            axes.annotate(f"{value:.0f}", (value, y), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set(title="Qwen2.5-3B on two A100s: ms a step\n(grey: published)", xlabel="ms", xlim=(0, 3300))
        axes.set_yticks(at, [name for name, *_ in bars])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        plotting.save(plt, figure, file)
