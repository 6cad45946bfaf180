"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.megatron_2019.claims import shares

HEIGHT = 2.8


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Efficiency by ranks of tensor parallelism, and with data parallelism by all GPUs.

    Raises:
        ImportError: without matplotlib.
    """
    rows = found["rows"]
    with plotting.style() as plt:
        figure, plots = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.6), layout="constrained")
        for axes, gpus, published, lines in zip(
            plots,
            ("tensor", "gpus_with_data"),
            ("tensor_percent", "data_percent"),
            ((("tensor", "ours"),), (("data", "ours,\napart"), ("beside", "ours,\nbeside"))),
            strict=True,
        ):
            places = [row[gpus] for row in rows]
            axes.plot(places, [row[published] for row in rows], "o-", color=plotting.GREY)
            ends = [(rows[-1][published], "published", plotting.GREY)]
            for (key, name), colour in zip(lines, (plotting.BLUE, plotting.GREEN), strict=False):
                line = shares(found, f"ours, {key}")
                axes.plot(places, line, "x--", color=colour)
                ends.append((line[-1], name, colour))
            title = "Tensor parallelism" if gpus == "tensor" else "Tensor and data parallelism"
            axes.set(title=title, xlabel="GPUs", ylabel="% of one GPU's speed", xscale="log", ylim=(0, 108))
            axes.set_xticks(places, [f"{n:g}" for n in places])
            axes.minorticks_off()
            plotting.name_lines(axes, HEIGHT, ends)
        plotting.save(plt, figure, file)
