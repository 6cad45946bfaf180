"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.ring_attention.claims import ROOM

HEIGHT = 3.2
COLOURS = {"3B": plotting.BLUE, "7B": plotting.GREEN, "13B": plotting.RED}


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw planned memory by the length of a sequence, with and without a ring, around the published lengths.

    Raises:
        ImportError: without matplotlib.
    """
    rows = [row for row in found["lengths"] if row["gpus"] == 8]
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 1.6), layout="constrained")
        for row in rows:
            colour = COLOURS[row["model"]]
            for scheme, style in (("blockwise", "x--"), ("ring", "o")):
                axes.plot(
                    [one["tokens"] // 1024 for one in row[scheme]],
                    [one["GB"] for one in row[scheme]],
                    style,
                    color=colour,
                )
                first = row[scheme][0]
                axes.annotate(
                    row["model"],
                    (first["tokens"] // 1024, first["GB"]),
                    xytext=(0, -14),
                    textcoords="offset points",
                    ha="center",
                    color=colour,
                    weight="bold",
                )
        axes.axhline(ROOM, color=plotting.GREY)
        axes.annotate(
            "a GPU of 80 GB", (1000, ROOM), xytext=(0, 4), textcoords="offset points", ha="right", color=plotting.GREY
        )
        ticks = [16, 32, 64, 128, 256, 512, 1024]
        axes.set(
            title="GB of each of 8 GPUs: the longest published sequence\n(dashed, to twice as long: one on each GPU; dots: a ring)",
            xlabel="tokens of a sequence",
            ylabel="GB, planned",
            xscale="log",
            ylim=(0, 115),
        )
        axes.set_xticks(ticks, [f"{tick}K" for tick in ticks])
        axes.minorticks_off()
        plotting.save(plt, figure, file)
