"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 2.2
NAMES = {"ddp": "DDP\n24", "zero3": "ZeRO-3\n160", "gemini": "Gemini\n160"}
COLOURS = {"published": plotting.GREY, "ours": plotting.BLUE, "whole logits": plotting.GREEN}


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw memory, and speed as a multiple of DDP's.

    Raises:
        ImportError: without matplotlib.
    """
    rows = found["rows"]
    with plotting.style() as plt:
        figure, panels = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.6), layout="constrained")
        for axes, key, title in (
            (panels[0], "GB", "Memory of a GPU, GB"),
            (panels[1], "samples/s", "Samples a second, by DDP's"),
        ):
            for place, (who, colour) in enumerate(COLOURS.items()):
                values = [row[who][key] / (rows[0][who][key] if key == "samples/s" else 1) for row in rows]
                at = [i + 0.27 * (place - 1) for i in range(len(rows))]
                axes.bar(at, values, width=0.25, color=colour, label=who)
                for x, value in zip(at, values, strict=True):
                    said = f"{value:.0f}" if key == "GB" else f"{value:.2f}"
                    axes.annotate(said, (x, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=9)
            axes.set(title=title)
            axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
            axes.set_xticks(range(len(rows)), [NAMES[row["strategy"]] for row in rows])
            axes.grid(axis="x", visible=False)
        panels[1].set_xlabel("strategy, sequences a step")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        plotting.save(plt, figure, file)
