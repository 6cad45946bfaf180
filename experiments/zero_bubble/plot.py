"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.zero_bubble.claims import published

COLOURS = {
    "1F1B": "#4c4c4c",
    "1F1B-I": "#b07d2b",
    "ZB-H1": "#2463a8",
    "ZB-H2": "#2a8f5f",
    "ZB-2p": "#b3323c",
    "ZB-V": "#8a4fa8",
}


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Bubble rates of tables 5 and 8, published and simulated.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    tables = [
        ("table 5, times of table 9", found["rates"], "published_rates.csv", list(COLOURS)[:5]),
        (
            "table 8, times fitted to its 1F1B and ZB-H1",
            found["fitted"],
            "published_rates_v.csv",
            [*list(COLOURS)[:4], "ZB-V"],
        ),
    ]
    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        figure, plots = plt.subplots(1, 2, figsize=(14, 5.2), layout="constrained", sharey=True)
        for axes, (title, rows, source, names) in zip(plots, tables, strict=True):
            printed = published(source)
            places = range(len(rows))
            for name in names:
                theirs = [float(printed[row["model"], row["m"]][name]) for row in rows]
                axes.plot(places, theirs, "o", color=COLOURS[name], markersize=9, markerfacecolor="none")
                axes.plot(places, [row["rate"][name] for row in rows], "x", color=COLOURS[name], label=name)
            axes.plot([], [], "o", color="#777777", markersize=9, markerfacecolor="none", label="published")
            axes.plot([], [], "x", color="#777777", label="simulated")
            labels = [f"{row['model']}\n{row['p']}\n{row['m']}" for row in rows]
            axes.set_xticks(list(places), labels, fontsize=8)
            axes.set(title=f"Bubble rates, {title}", ylim=(0, 0.33), xlabel="model, stages, micro-batches")
            axes.legend(fontsize=8.5, ncols=4, loc="upper left")
        plots[0].set_ylabel("idle share of the longest span of a rank")
        figure.savefig(file, dpi=130)
        plt.close(figure)
