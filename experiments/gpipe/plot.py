"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

COLOURS = {1: plotting.GREY, 4: plotting.BROWN, 32: plotting.BLUE}
HEIGHT = 2.6


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Throughput against K, published and simulated.

    Raises:
        ImportError: without matplotlib.
    """
    panels = [
        ("T2", "Transformer-48", "Transformer-48 on TPUv2 (table 2)", "equal stages"),
        ("T2", "AmoebaNet-D", "AmoebaNet-D on TPUv2 (table 2)", "a heavier stage"),
        ("T3", "Transformer-24", "Transformer-24 on P100 over PCIe (table 3)", "equal stages"),
    ]
    with plotting.style() as plt:
        figure, plots = plt.subplots(3, 1, figsize=(plotting.WIDTH, 3 * HEIGHT + 2.8), layout="constrained")
        for axes, (table, model, title, ours) in zip(plots, panels, strict=True):
            rows = [row for row in found["throughput"] if (row["table"], row["model"]) == (table, model)]
            ends = []
            for m in sorted({row["M"] for row in rows}):
                line = sorted((row for row in rows if row["M"] == m), key=lambda row: row["K"])
                ranks = [row["K"] for row in line]
                axes.plot(ranks, [row["published"] for row in line], "o-", color=COLOURS[m])
                axes.plot(ranks, [row[ours] for row in line], "x--", color=COLOURS[m])
                ends.append((line[-1]["published"], f"{m} micro-batch{'es' * (m > 1)}", COLOURS[m]))
                ends.append((line[-1][ours], f"{m}, simulated", COLOURS[m]))
            axes.set(
                title=f"{title}\nsolid: published; dashed: simulated, {ours}",
                xlabel="accelerators",
                ylabel="throughput (paper's unit)",
                ylim=0,
            )
            axes.set_xticks([2, 4, 8])
            plotting.name_lines(axes, HEIGHT, ends)
        plotting.save(plt, figure, file)
