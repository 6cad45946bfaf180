"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.gemini_ablation.simulated import STAGES

HEIGHT = 2.8
COLOURS = (plotting.GREY, plotting.GREEN, plotting.BROWN, plotting.BLUE)


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw how many times as fast a step is with each technique more.

    Raises:
        ImportError: without matplotlib.
    """
    models = list(dict.fromkeys(row["model"] for row in found["rows"]))
    first = {row["model"]: row["seconds"] for row in found["rows"] if row["stage"] == STAGES[0]}
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 1.2), layout="constrained")
        for number, (stage, colour) in enumerate(zip(STAGES, COLOURS, strict=True)):
            values = [first[row["model"]] / row["seconds"] for row in found["rows"] if row["stage"] == stage]
            name = stage if number == 0 else f"+ {stage}"
            at = [place + 0.2 * (number - 1.5) for place in range(len(models))]
            axes.bar(at, values, width=0.18, color=colour, label=name)
            for x, value in zip(at, values, strict=True):
                axes.annotate(
                    f"{value:.2f}", (x, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7
                )
        axes.set(title="Speed of a step by that without any", ylabel="times as fast")
        axes.set_xticks(range(len(models)), models)
        axes.grid(axis="x", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        plotting.save(plt, figure, file)
