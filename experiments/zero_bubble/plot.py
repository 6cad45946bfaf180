"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.zero_bubble.claims import published

COLOURS = {
    "1F1B": plotting.GREY,
    "1F1B-I": plotting.BROWN,
    "ZB-H1": plotting.BLUE,
    "ZB-H2": plotting.GREEN,
    "ZB-2p": plotting.RED,
    "ZB-V": plotting.PURPLE,
}
WORDS = {"1F1B-I": "1F1B,\ninterleaved"}
HEIGHT = 3.6


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Bubble rates of tables 5 and 8, published and simulated.

    Raises:
        ImportError: without matplotlib.
    """
    tables = [
        ("Table 5, simulated with the times of table 9", "rates", "published_rates.csv", "ZB-2p"),
        ("Table 8, times fitted to its 1F1B and ZB-H1", "fitted", "published_rates_v.csv", "ZB-V"),
    ]
    with plotting.style() as plt:
        figure, plots = plt.subplots(
            2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.9), layout="constrained", sharey=True
        )
        for axes, (title, key, source, last) in zip(plots, tables, strict=True):
            _table(axes, found[key], published(source), [*list(COLOURS)[:4], last])
            axes.set_title(f"{title}\nrings: published, crosses: simulated")
        plotting.save(plt, figure, file)


def _table(axes: Any, rows: Any, printed: Mapping[Any, Any], names: list[str]) -> None:
    """Draw a line for each model and schedule."""
    models: dict[tuple[str, int], list[int]] = {}
    for place, row in enumerate(rows):
        models.setdefault((row["model"], row["p"]), []).append(place)
    for name in names:
        colour = COLOURS[name]
        for places in models.values():
            theirs = [float(printed[rows[i]["model"], rows[i]["m"]][name]) for i in places]
            axes.plot(places, theirs, "o", color=colour, markersize=8, markerfacecolor="none")
            axes.plot(places, [rows[i]["rate"][name] for i in places], "x-", color=colour, linewidth=1)
    axes.set_xticks(range(len(rows)), [str(row["m"]) for row in rows], fontsize=9)
    for (model, stages), places in models.items():
        middle = sum(places) / len(places), -0.11
        words = f"{model}\n{stages} stages"
        axes.annotate(words, middle, xycoords=axes.get_xaxis_transform(), ha="center", va="top", annotation_clip=False)
    axes.set(ylim=(0, 0.3), ylabel="idle share of a rank's longest span")
    axes.set_xlabel("micro-batches; model; pipeline stages", labelpad=34)
    ends = [(rows[-1]["rate"][name], WORDS.get(name, name), COLOURS[name]) for name in names]
    plotting.name_lines(axes, HEIGHT, ends)
