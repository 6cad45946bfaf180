"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.patrickstar.claims import labels

HEIGHT = 2.4


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw TFLOP/s by the size of a model on one GPU and on eight; a line ends at the largest that fits.

    Raises:
        ImportError: without matplotlib.
    """
    theirs = labels(found)
    with plotting.style() as plt:
        figure, plots = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.8), layout="constrained")
        for gpus, axes in zip((1, 8), plots, strict=True):
            for placement, name, colour in (
                ("host", "ours, everything on the host", plotting.GREEN),
                ("planned", "ours, planned placement", plotting.BLUE),
            ):
                rows = [
                    row for row in found["rows"] if (row["gpus"], row["placement"]) == (gpus, placement) and row["fits"]
                ]
                axes.plot(
                    [row["billions"] for row in rows], [row["TFLOPS"] for row in rows], "x-", color=colour, label=name
                )
            chart = [(size, value) for (count, size), value in theirs.items() if count == gpus]
            axes.plot(*zip(*chart, strict=True), "o-", color=plotting.GREY, label="PatrickStar, published")
            plural = "s" if gpus > 1 else ""
            axes.set(
                title=f"{gpus} V100{plural}, 240 GB of host memory", ylabel="TFLOP/s", ylim=(0, None), xlim=(0, 21)
            )
        plots[1].set_xlabel("billions of parameters")
        figure.legend(*plots[1].get_legend_handles_labels(), loc="outside lower center", ncols=1)
        plotting.save(plt, figure, file)
