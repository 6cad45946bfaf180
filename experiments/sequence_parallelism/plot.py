"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.sequence_parallelism.counting import RING, RING_SELF, TENSOR
from experiments.sequence_parallelism.plan import CARD, MB, published

COLOURS = {TENSOR: plotting.BROWN, RING_SELF: plotting.BLUE, RING: plotting.GREEN}
NAMES = {
    TENSOR: "tensor\nparallelism",
    RING_SELF: "ring self-\nattention",
    RING: "Meshfold's\nring",
}
HEIGHT = 2.7


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Memory and tokens per second of table 4, published and ours, and the longest sequences of the plan.

    Raises:
        ImportError: without matplotlib.
    """
    rows = published()
    with plotting.style() as plt:
        figure, (batch, length, speed, longest) = plt.subplots(
            4, 1, figsize=(plotting.WIDTH, 4 * HEIGHT + 3.7), layout="constrained"
        )
        for axes, start, title in (
            (batch, 0, "Memory, batch 64 for each rank, 512 tokens"),
            (length, 4, "Memory, batch 64, 256 tokens for each rank"),
        ):
            columns = {TENSOR: "tp_mb", RING_SELF: "sp_mb", RING: "ring_mb"}
            axes.axhline(CARD / MB / 1024, color=plotting.RED, linewidth=1, linestyle=":")
            axes.text(1, CARD / MB / 1024 + 0.3, "a P100 has this much", color=plotting.RED)
            axes.set(
                title=f"{title}\nrings: published in table 4; crosses: our plan",
                ylabel="memory of a rank, GB",
                ylim=(0, 20),
            )
            _table(axes, rows, found["memory"], start, columns, 1 / 1024)
        speed.set(
            title="Speed, batch 64, 256 tokens for each rank\nrings: published; crosses: one rank's time, and\n"
            f"bytes at {found['clock']['bandwidth'] / 1e9:.2f} GB/s",
            ylabel="thousand tokens per second",
            ylim=(0, 28),
        )
        columns = {TENSOR: "tp_tokens_s", RING_SELF: "sp_tokens_s"}
        _table(speed, rows, found["clock"]["rows"], 4, columns, 1e-3)
        _longest(longest, found["sizes"])
        plotting.save(plt, figure, file)


def _longest(axes: Any, sizes: Any) -> None:
    """Draw the longest sequence that the plan says to fit, by ranks."""
    ends = []
    for scheme, colour in COLOURS.items():
        line = [row for row in sizes if (row["model"], row["scheme"]) == ("BERT-Base", scheme)]
        axes.loglog([row["N"] for row in line], [row["length"] for row in line], "x--", color=colour, base=2)
        ends.append((line[-1]["length"], NAMES[scheme], colour))
    axes.set(
        title="Longest sequence by our plan\nBERT-Base, batch 64, on P100s",
        xlabel="ranks",
        ylabel="tokens of a sequence",
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    plotting.name_lines(axes, HEIGHT, ends)


def _table(axes: Any, rows: Any, ours: Any, start: int, columns: Mapping[str, str], unit: float) -> None:
    """Draw four rows of table 4: published as rings, ours as lines."""
    ends = []
    for scheme, column in columns.items():
        theirs = [row for row in rows[start : start + 4] if row.get(column) is not None]
        places, values = [row["N"] for row in theirs], [row[column] * unit for row in theirs]
        axes.plot(places, values, "o", color=COLOURS[scheme], markersize=9, markerfacecolor="none")
        planned = ours[start : start + 4]
        line = [row[column] * unit for row in planned]
        axes.plot([row["N"] for row in planned], line, "x--", color=COLOURS[scheme])
        ends.append((line[-1], NAMES[scheme], COLOURS[scheme]))
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_xlabel("ranks")
    plotting.name_lines(axes, HEIGHT, ends)
