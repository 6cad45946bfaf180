"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 3.4


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw tokens a second of a GPU as published and planned, row by row.

    Raises:
        ImportError: without matplotlib.
    """
    rows = [row for row in found["rows"] if "ours" in row]
    names = [
        f"{row['model']}, {row['gpus']} GPUs,\n{'FSDP' if row['tensor'] == 1 else 'FSDP + TP'}, {row['technique']}"
        for row in rows
    ]
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 2.4), layout="constrained")
        asynchronous = [i for i, row in enumerate(rows) if row["technique"] == "async"]
        others = [i for i in range(len(rows)) if i not in asynchronous]
        for shift, who, places, colour in (
            (-0.2, "published", range(len(rows)), plotting.GREY),
            (0.2, "ours", others, plotting.BLUE),
            (0.2, "ours, at most", asynchronous, plotting.GREEN),
        ):
            key = {"ours": "TPS", "ours, at most": "most"}.get(who)
            values = [rows[i]["published"] if key is None else rows[i]["ours"][key] for i in places]
            at = [i + shift for i in places]
            axes.barh(at, values, height=0.36, color=colour, label=who)
            for y, value in zip(at, values, strict=True):
                axes.annotate(
                    f"{value:,.0f}",
                    (value, y),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                )
        axes.set(title="Tokens a second of an H100, bf16", xlim=(0, 10_400))
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3)
        plotting.save(plt, figure, file)
