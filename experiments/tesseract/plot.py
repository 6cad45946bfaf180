"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.tensor_sweep import factors
from experiments.tesseract.claims import DEEP, MAIN, OTHERS, implied, published

HEIGHT = 3.2


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Gains over 1D and 2D by batch, and the published ones at the batch that 1D's implies.

    Raises:
        ImportError: without matplotlib.
    """
    rows, said = found["sweeps"][MAIN], published()
    batches = [row["batch"] for row in rows]
    with plotting.style() as plt:
        figure, plots = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.6), layout="constrained")
        for axes, kind, title in zip(
            plots, ("inference", "training"), ("Forward", "Forward and backward"), strict=True
        ):
            ends = []
            for over, colour in (("1d", plotting.BLUE), ("2d", plotting.GREEN)):
                line = factors(rows, kind, OTHERS[over], DEEP)
                axes.plot(batches, line, "x--", color=colour)
                ends.append((line[-1], f"over {over.upper()}", colour))
                weak = implied(rows, "inference", said["weak", "inference", "1d"])
                axes.plot([weak], [said["weak", kind, over]], "o", color=colour)
                strong = implied(rows, "inference", said["strong", "speed", "1d"])
                axes.plot([strong], [said["strong", "speed", over]], "o", color=colour)
            axes.set(
                title=f"{title}: 2.5D on 64 A100s\ndots: published; dashed: ours",
                xlabel="sequences of a batch",
                ylabel="times as fast",
                xscale="log",
                ylim=(0, None),
            )
            axes.axhline(1, color=plotting.INK, linewidth=0.8)
            axes.set_xticks(batches, [str(n) for n in batches])
            axes.minorticks_off()
            plotting.name_lines(axes, HEIGHT, ends)
        plotting.save(plt, figure, file)
