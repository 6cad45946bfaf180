"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 2.9


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Bytes, time and the longest chain by ranks.

    Raises:
        ImportError: without matplotlib.
    """
    phase = found["traffic"][-1]["phase"]
    traffic = [row for row in found["traffic"] if row["phase"] == phase]
    blocks = [row for row in found["overlap"] if row["phase"] == phase]
    lengths = found["lengths"]
    with plotting.style() as plt:
        figure, plots = plt.subplots(3, 1, figsize=(plotting.WIDTH, 3 * HEIGHT + 2.0), layout="constrained")
        panels = [
            (
                "What a rank sends for a block\n512 sequences × 384 residues, forward and backward",
                "million elements",
                [row["N"] for row in traffic],
                [
                    ("tensor parallel", plotting.RED, [sum(row["tensor"].values()) / 1e6 for row in traffic]),
                    ("axial", plotting.BLUE, [sum(row["dap"].values()) / 1e6 for row in traffic]),
                ],
            ),
            (
                "Time of that block, on the clock of A100s",
                "milliseconds",
                [row["N"] for row in blocks],
                [
                    ("a wait\nfor each", plotting.BROWN, [1e3 * row["sync"] for row in blocks]),
                    ("overlapped", plotting.GREEN, [1e3 * row["async"] for row in blocks]),
                ],
            ),
            (
                "Longest chain in a prediction",
                "residues",
                [row["N"] for row in lengths],
                [
                    (name.partition(", ")[2], colour, [row["longest"][name] for row in lengths])
                    for name, colour in zip(lengths[0]["longest"], (plotting.PURPLE, plotting.BLUE), strict=True)
                ],
            ),
        ]
        for axes, (title, label, ranks, lines) in zip(plots, panels, strict=True):
            for _, colour, values in lines:
                axes.plot(ranks, values, "o-", color=colour)
            axes.set(title=title, xlabel="ranks", ylabel=label, ylim=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(ranks, [str(n) for n in ranks])
            plotting.name_lines(axes, HEIGHT, [(values[-1], name, colour) for name, colour, values in lines])
        plotting.save(plt, figure, file)
