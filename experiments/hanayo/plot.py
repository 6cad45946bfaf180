"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.hanayo.claims import formula, over_all

COLOURS = {"1": "#2463a8", "2": "#2a8f5f", "4": "#b3323c"}
OTHERS = ("#4c4c4c", "#b07d2b")


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Idle share by ranks, and by what messages take.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    panels = [
        ("P", found["free messages"], "ranks = micro-batches", "Free messages"),
        (
            "send",
            found["messages"],
            "time of a message ÷ a rank's forward time",
            "8 ranks, messages that take time",
        ),
    ]
    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        figure, plots = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained", sharey=True)
        for axes, (key, rows, label, title) in zip(plots, panels, strict=True):
            places = [row[key] for row in rows]
            for colour, name in zip(OTHERS, rows[0]["others"], strict=True):
                axes.plot(places, [row["others"][name] for row in rows], ".:", color=colour, label=name)
            for w, colour in COLOURS.items():
                name = f"Hanayo, {w} wave{'s' * (w != '1')}"
                axes.plot(places, [row["hanayo"][w] for row in rows], "x-", color=colour, label=name)
                if key == "P":
                    found_so = [formula(p, int(w)) for p in places]
                    axes.plot(places, found_so, "o", color=colour, markerfacecolor="none", markersize=8)
                    axes.plot(places, [over_all(p, int(w)) for p in places], "_", color=colour, markersize=13)
            if key == "P":
                axes.plot([], [], "o", color="#777777", markerfacecolor="none", label="formula as found")
                axes.plot([], [], "_", color="#777777", markersize=13, label="its idle time over all time")
                axes.set_xscale("log", base=2)
                axes.set_xticks(places, [str(p) for p in places])
            axes.set(title=title, xlabel=label, ylim=(0, 0.68))
            axes.legend(fontsize=8.5, ncols=2, loc="upper left")
        plots[0].set_ylabel("idle share of a step between barriers")
        figure.savefig(file, dpi=130)
        plt.close(figure)
