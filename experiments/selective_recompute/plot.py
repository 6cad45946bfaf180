"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 3.0


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Memory of a layer against its time, published and ours, by scheme.

    Raises:
        ImportError: without matplotlib.
    """
    kept = {row["scheme"]: row for row in found["bytes"]}
    pairs = {
        "nothing recomputed": "tensor",
        "sequence parallel": "tensor + sequence",
        "selective": "tensor + selective",
        "selective + sequence parallel": "tensor + sequence + selective",
        "full": "full",
    }
    names = ("nothing", "sequence\nparallel", "selective", "both", "full")
    colours = (plotting.GREY, plotting.BROWN, plotting.BLUE, plotting.GREEN, plotting.RED)
    layer = {row["scheme"]: row for row in found["layer"]}
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 1.2), layout="constrained")
        for (scheme, memory), name, colour in zip(pairs.items(), names, colours, strict=True):
            theirs = layer[scheme]["published"]["combined"], kept[memory]["formula"] / 2**20
            ours = layer[scheme]["ours"]["combined"], kept[memory]["counted"] / 2**20
            axes.plot(*theirs, "o", color=colour)
            axes.plot(*ours, "x", color=colour)
            axes.annotate(name, ours, xytext=(7, 2), textcoords="offset points", color=colour, weight="bold")
        axes.set(
            title="A layer of 22 billion parameters' model on 8 A100s\ndots: published; crosses: ours",
            xlabel="milliseconds, forward and backward",
            ylabel="MiB kept",
            xlim=(17, 35),
            ylim=0,
        )
        plotting.save(plt, figure, file)
