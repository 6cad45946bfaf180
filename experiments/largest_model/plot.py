"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.largest_model.claims import largest

HEIGHT = 2.2


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw the largest model on one GPU with everything on the host, and with planned placement.

    Raises:
        ImportError: without matplotlib.
    """
    most = largest(found)
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 1.2), layout="constrained")
        for shift, name, values, colour in (
            (-0.2, "published", (18, 24), plotting.GREY),
            (0.2, "ours, planned", (most["cpu"], most["auto"]), plotting.BLUE),
        ):
            at = [i + shift for i in range(2)]
            axes.bar(at, values, width=0.36, color=colour, label=name)
            for x, value in zip(at, values, strict=True):
                axes.annotate(f"{value:.0f}", (x, value), xytext=(0, 2), textcoords="offset points", ha="center")
        axes.set(
            title="Largest model on an A100 of 40 GB with 500 GB of host\nmemory, billions of parameters", ylim=(0, 37)
        )
        axes.set_xticks(range(2), ["everything\non the host", "planned placement\n(Gemini's auto)"])
        axes.grid(axis="x", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        plotting.save(plt, figure, file)
