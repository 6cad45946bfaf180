"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 3.2
COLOURS = (plotting.BROWN, plotting.BLUE, plotting.GREEN)


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Model states of 7.5 billion parameters by ranks and stages.

    Raises:
        ImportError: without matplotlib.
    """
    rows = [row for row in found["states"] if row["model"] == "7.5B"]
    ranks = [row["ranks"] for row in rows]
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 1.2), layout="constrained")
        ends = []
        for stage, colour in enumerate(COLOURS):
            axes.plot(ranks, [row["published"][stage] for row in rows], "o", color=colour)
            line = [row["ours"][stage] for row in rows]
            axes.plot(ranks, line, "-", color=colour)
            ends.append((line[-1], f"stage {stage + 1}", colour))
        axes.set(
            title="Model states of 7.5 billion parameters\ndots: published; lines: formulas",
            xlabel="ranks",
            ylabel="GB on a device",
            xscale="log",
            yscale="log",
        )
        axes.set_xticks(ranks, [str(n) for n in ranks])
        plotting.name_lines(axes, HEIGHT, ends)
        plotting.save(plt, figure, file)
