"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.sequence_parallelism.counting import RING, RING_SELF, TENSOR
from experiments.sequence_parallelism.plan import CARD, MB, published

COLOURS = {TENSOR: "#b07d2b", RING_SELF: "#2463a8", RING: "#2a8f5f"}
NAMES = {
    TENSOR: "tensor parallelism",
    RING_SELF: "ring self-attention",
    RING: "ring of Meshfold",
}


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Memory and tokens per second of table 4, published and ours, and the longest sequences of the plan.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    rows = published()
    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        figure, ((batch, length), (speed, longest)) = plt.subplots(
            2, 2, figsize=(13, 9), layout="constrained"
        )
        for axes, start, title in (
            (batch, 0, "Table 4: memory, batch 64 N, 512 tokens"),
            (length, 4, "Table 4: memory, batch 64, 256 N tokens"),
        ):
            columns = {TENSOR: "tp_mb", RING_SELF: "sp_mb", RING: "ring_mb"}
            _table(axes, rows, found["memory"], start, columns, 1 / 1024, "plan")
            axes.axhline(CARD / MB / 1024, color="#b3323c", linewidth=1, linestyle=":")
            axes.text(1, CARD / MB / 1024 + 0.2, "a P100", color="#b3323c", fontsize=8.5)
            axes.set(title=title, xlabel="ranks N", ylabel="memory of a rank, GB", ylim=(0, 26))
        columns = {TENSOR: "tp_tokens_s", RING_SELF: "sp_tokens_s"}
        _table(speed, rows, found["clock"]["rows"], 4, columns, 1e-3, "clock")
        speed.set(
            title=f"Table 4: tokens per second, batch 64, 256 N tokens\nclock: one rank's time, and bytes at "
            f"{found['clock']['bandwidth'] / 1e9:.2f} GB/s",
            xlabel="ranks N",
            ylabel="thousand tokens per second",
            ylim=(0, 32),
        )
        for scheme, colour in COLOURS.items():
            line = [row for row in found["sizes"] if (row["model"], row["scheme"]) == ("BERT-Base", scheme)]
            longest.loglog(
                [row["N"] for row in line],
                [row["length"] for row in line],
                "x--",
                color=colour,
                label=NAMES[scheme],
                base=2,
            )
        longest.set(
            title="The plan: longest sequence on P100s, BERT-Base, batch 64",
            xlabel="ranks N",
            ylabel="longest sequence, tokens",
        )
        longest.legend(fontsize=8.5)
        figure.savefig(file, dpi=110)
        plt.close(figure)


def _table(
    axes: Any, rows: Any, ours: Any, start: int, columns: Mapping[str, str], unit: float, how: str
) -> None:
    """Four rows of table 4: published as circles, ours as lines."""
    for scheme, column in columns.items():
        theirs = [row for row in rows[start : start + 4] if row.get(column) is not None]
        colour = COLOURS[scheme]
        axes.plot(
            [row["N"] for row in theirs],
            [row[column] * unit for row in theirs],
            "o",
            color=colour,
            markersize=9,
            markerfacecolor="none",
            label=f"{NAMES[scheme]}, published" if theirs else None,
        )
        planned = ours[start : start + 4]
        axes.plot(
            [row["N"] for row in planned],
            [row[column] * unit for row in planned],
            "x--",
            color=colour,
            label=f"{NAMES[scheme]}, {how}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.legend(fontsize=8.5, loc="upper left", ncols=2)
