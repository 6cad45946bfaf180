"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

COLOURS = {"SGD": plotting.GREY, "LARS": plotting.GREEN, "AdamW": plotting.BLUE, "LAMB": plotting.RED}
HEIGHT = 3.5


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Loss by batch.

    Raises:
        ImportError: without matplotlib.
    """
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 0.7), layout="constrained")
        ends = []
        for name, one in found["methods"].items():
            batches = [int(batch) for batch in one["losses"]]
            axes.plot(batches, [*one["losses"].values()], "x-", color=COLOURS[name])
            ends.append((one["losses"][str(batches[-1])], name, COLOURS[name]))
        axes.axhline(found["guess"], linestyle=":", color=plotting.GREY)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set(title="The same samples, rates scaled by the root\ndots: guessing", xlabel="sequences a batch")
        axes.set_ylabel("loss on held-out text")
        plotting.name_lines(axes, HEIGHT, ends)
        plotting.save(plt, figure, file)
