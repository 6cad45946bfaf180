"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 3.0


def draw(found: Mapping[str, Any], file: Path) -> None:
    """TFLOP/s a GPU by parameters, and of both schemes by GPUs.

    Raises:
        ImportError: without matplotlib.
    """
    with plotting.style() as plt:
        figure, plots = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.6), layout="constrained")
        first, second = plots
        rows = found["table 1"]
        sizes = [row["params_B"] for row in rows]
        first.plot(sizes, [row["tflops"] for row in rows], "o-", color=plotting.BLUE)
        first.plot(sizes, [row["ours, TFLOP/s"] for row in rows], "x--", color=plotting.BLUE)
        first.set(title="Table 1: ten models on 32 to 3072 A100s", xlabel="billion parameters", ylabel="TFLOP/s a GPU")
        first.set(ylim=(0, 200), xscale="log")
        ends = [
            (rows[-1][key], name, plotting.BLUE) for key, name in (("tflops", "published"), ("ours, TFLOP/s", "ours"))
        ]
        plotting.name_lines(first, HEIGHT, ends)
        ends = []
        for scheme, colour in (("PTD", plotting.GREEN), ("ZeRO-3", plotting.RED)):
            line = [row for row in found["table 2"] if row["scheme"] == scheme and row["params_B"] < 200]
            gpus = [row["gpus"] for row in line]
            second.plot(gpus, [row["tflops"] for row in line], "o-", color=colour)
            second.plot(gpus, [row["ours, TFLOP/s"] for row in line], "x--", color=colour)
            name = "tensor +\npipeline" if scheme == "PTD" else scheme
            ends.append((line[-1]["tflops"], name, colour))
        second.set(
            title="Table 2: 175 billion parameters, 1536 sequences\nsolid: published; dashed: ours",
            xlabel="GPUs",
            ylabel="TFLOP/s a GPU",
            ylim=(0, 200),
        )
        plotting.name_lines(second, HEIGHT, ends)
        plotting.save(plt, figure, file)
