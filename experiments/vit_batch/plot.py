"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.vit_batch.claims import published

HEIGHT = 2.8


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Batches and speeds in those of 1D.

    Raises:
        ImportError: without matplotlib.
    """
    said = published()
    schemes = ("2d", "2.5d")
    by = {(row["scheme"], row["recomputed"]): row for row in found["rows"]}
    first = {
        "published": [said[s]["batch"] / said["1d"]["batch"] for s in schemes],
        **{
            name: [by[s, again]["batch"] / by["1d", again]["batch"] for s in schemes]
            for name, again in (("nothing recomputed", False), ("every layer recomputed", True))
        },
    }
    one = by["1d", True]["images"]["rings"]
    second = {
        "published": [said[s]["throughput"] / said["1d"]["throughput"] for s in schemes],
        **{charge: [by[s, True]["images"][charge] / one for s in schemes] for charge in ("trees", "rings")},
    }
    with plotting.style() as plt:
        figure, plots = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.6), layout="constrained")
        titles = ("Largest batch, in that of 1D", "Speed at it, in that of 1D")
        colours = (plotting.GREY, plotting.GREEN, plotting.BLUE)
        for axes, groups, title in zip(plots, (first, second), titles, strict=True):
            rows = [
                (f"{scheme.upper()}: {name}", values[i], colour)
                for i, scheme in enumerate(schemes)
                for (name, values), colour in zip(groups.items(), colours, strict=True)
            ]
            places = [-(i + (i >= len(groups)) * 0.5) for i in range(len(rows))]
            axes.barh(places, [value for _, value, _ in rows], color=[colour for *_, colour in rows])
            axes.set_yticks(places, [name for name, *_ in rows])
            for place, (_, value, _) in zip(places, rows, strict=True):
                axes.annotate(f" {value:.1f}", (value, place), va="center", fontsize=9.5)
            axes.set(title=title, xlim=(0, 1.15 * max(value for _, value, _ in rows)))
            axes.grid(visible=False, axis="y")
        plotting.save(plt, figure, file)
