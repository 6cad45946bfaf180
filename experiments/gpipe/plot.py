"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {1: "#8c8c8c", 4: "#b07d2b", 32: "#2463a8"}


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Throughput against K, published and simulated.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    panels = [
        ("T2", "Transformer-48", "Transformer-48 on TPUv2 (table 2)", "equal stages"),
        ("T2", "AmoebaNet-D", "AmoebaNet-D on TPUv2 (table 2)", "a heavier stage"),
        ("T3", "Transformer-24", "Transformer-24 on P100 over PCIe (table 3)", "equal stages"),
    ]
    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        figure, plots = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
        for axes, (table, model, title, ours) in zip(plots, panels, strict=True):
            rows = [row for row in found["throughput"] if (row["table"], row["model"]) == (table, model)]
            for m in sorted({row["M"] for row in rows}):
                line = sorted((row for row in rows if row["M"] == m), key=lambda row: row["K"])
                ranks = [row["K"] for row in line]
                axes.plot(
                    ranks,
                    [row["published"] for row in line],
                    "o-",
                    color=COLOURS[m],
                    label=f"{m} micro-batches, published",
                )
                axes.plot(
                    ranks,
                    [row[ours] for row in line],
                    "x--",
                    color=COLOURS[m],
                    label=f"{m} micro-batches, simulated, {ours}",
                )
            axes.set(
                title=title, xlabel="accelerators K", ylabel="throughput, normalised as in the paper", ylim=0
            )
            axes.set_xticks([2, 4, 8])
            axes.legend(fontsize=8)
        figure.savefig(file, dpi=130)
        plt.close(figure)
