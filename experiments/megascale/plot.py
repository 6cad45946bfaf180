"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 3.2


def draw(found: Mapping[str, Any], file: Path) -> None:
    """MFU by GPUs, at both batches.

    Raises:
        ImportError: without matplotlib.
    """
    with plotting.style() as plt:
        figure, plots = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.6), layout="constrained")
        for axes, batch in zip(plots, (768, 6144), strict=True):
            ends = []
            for method, colour in (("MegaScale", plotting.GREEN), ("Megatron-LM", plotting.GREY)):
                rows = [row for row in found["table 2"] if (row["method"], row["batch"]) == (method, batch)]
                gpus = [row["GPUs"] for row in rows]
                for who, style in (("published", "o-"), ("ours", "x--")):
                    line = [100 * row[who]["MFU"] for row in rows]
                    axes.plot(gpus, line, style, color=colour)
                ends.append((100 * rows[-1]["published"]["MFU"], method, colour))
            axes.set(
                title=f"{batch} sequences a step\nsolid: published; dashed: ours",
                xlabel="GPUs",
                ylabel="MFU, %",
                ylim=(0, 75),
            )
            axes.set_xticks(gpus)
            plotting.name_lines(axes, HEIGHT, ends)
        plotting.save(plt, figure, file)
