"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.hanayo.claims import formula, over_all

COLOURS = {"1": plotting.BLUE, "2": plotting.GREEN, "4": plotting.RED}
OTHERS = (plotting.GREY, plotting.BROWN)
HEIGHT = 3.5


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Idle share by ranks, and by what messages take.

    Raises:
        ImportError: without matplotlib.
    """
    panels = [
        (
            "P",
            found["free messages"],
            "ranks (as many micro-batches)",
            "Messages that take no time\nrings: the published formula\ndashes: its idle time over all time",
        ),
        (
            "send",
            found["messages"],
            "time of a message ÷ a rank's forward time",
            "8 ranks, messages that take time",
        ),
    ]
    with plotting.style() as plt:
        figure, plots = plt.subplots(
            2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.7), layout="constrained", sharey=True
        )
        for axes, (key, rows, label, title) in zip(plots, panels, strict=True):
            places = [row[key] for row in rows]
            ends = []
            for colour, name in zip(OTHERS, rows[0]["others"], strict=True):
                line = [row["others"][name] for row in rows]
                axes.plot(places, line, ".:", color=colour)
                ends.append((line[-1], name.replace(", ", ",\n"), colour))
            for w, colour in COLOURS.items():
                line = [row["hanayo"][w] for row in rows]
                axes.plot(places, line, "x-", color=colour)
                ends.append((line[-1], f"Hanayo, {w} wave{'s' * (w != '1')}", colour))
                if key == "P":
                    found_so = [formula(p, int(w)) for p in places]
                    axes.plot(places, found_so, "o", color=colour, markerfacecolor="none", markersize=8)
                    axes.plot(places, [over_all(p, int(w)) for p in places], "_", color=colour, markersize=13)
            if key == "P":
                axes.set_xscale("log", base=2)
                axes.set_xticks(places, [str(p) for p in places])
            axes.set(title=title, xlabel=label, ylim=(0, 0.6), ylabel="idle share of a step")
            plotting.name_lines(axes, HEIGHT, ends)
        plotting.save(plt, figure, file)
