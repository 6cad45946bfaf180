"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 2.6
KINDS = {
    "data": plotting.GREY,
    "tensor": plotting.BLUE,
    "sequence": plotting.GREEN,
    "pipeline": plotting.BROWN,
    "zero bubble": plotting.RED,
    "composed": plotting.PURPLE,
}
LEAST = 1e-9
"""Shown where nothing differs: a logarithm has no zero."""


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw all losses, and how far each is from one process's.

    Raises:
        ImportError: without matplotlib.
    """
    serial, steps = found["serial"], range(1, found["steps"] + 1)
    with plotting.style() as plt:
        figure, plots = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.6), layout="constrained")
        losses, apart = plots
        for row in found["rows"]:
            colour = KINDS[row["kind"]]
            losses.plot(steps, row["losses"], color=colour)
            far = [max(LEAST, abs(one / other - 1)) for one, other in zip(row["losses"], serial, strict=True)]
            apart.plot(steps, far, color=colour, label=row["kind"])
        losses.set(title=f"Losses of one process and {len(found['rows'])} specs", ylabel="loss", ylim=(0, None))
        apart.axhline(1e-5, color=plotting.INK, linestyle=":")
        apart.set(title="Off by; dotted: what a claim allows", xlabel="step", ylabel="of the loss", yscale="log")
        handles = dict(zip(*reversed(apart.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
        plotting.save(plt, figure, file)
