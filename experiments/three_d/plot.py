"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.tensor_sweep import factors
from experiments.three_d.claims import CUBE, TWO, implied, published

HEIGHT = 3.4


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Gains over 1D and 2D by batch, and the published ones at the batch that 2D's implies.

    Raises:
        ImportError: without matplotlib.
    """
    rows, said = found["sweep"], published()
    batches = [row["batch"] for row in rows]
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 1.0), layout="constrained")
        ends = []
        for over, name, colour in (
            ("1d", "over 1D", plotting.BLUE),
            (TWO, "over 2D,\ntrees", plotting.GREEN),
            ("2d", "over 2D,\nrings", plotting.BROWN),
        ):
            line = factors(rows, "training", over, CUBE)
            axes.plot(batches, line, "x--", color=colour)
            ends.append((line[-1], name, colour))
        for over, colour in (("1d", plotting.BLUE), ("2d", plotting.GREEN)):
            axes.plot([implied(rows)], [said[over]], "o", color=colour)
        axes.axhline(1, color=plotting.INK, linewidth=0.8)
        axes.set(
            title="3D on 64 V100s, forward and backward\ndots: published; dashed: ours",
            xlabel="sequences of a batch",
            ylabel="times as fast",
            xscale="log",
            ylim=(0, None),
        )
        axes.set_xticks(batches, [str(n) for n in batches])
        axes.minorticks_off()
        plotting.name_lines(axes, HEIGHT, ends)
        plotting.save(plt, figure, file)
