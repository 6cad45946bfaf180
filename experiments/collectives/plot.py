"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 2.4


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Seconds by bytes, and how far α–β is off.

    Raises:
        ImportError: without matplotlib.
    """
    colours = (plotting.BLUE, plotting.GREEN, plotting.RED, plotting.BROWN, plotting.PURPLE, plotting.GREY)
    with plotting.style() as plt:
        figure, plots = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.8), layout="constrained")
        for axes, key in zip(plots, ("rate", "off"), strict=True):
            ends = []
            for link, colour in zip(found["links"], colours, strict=True):
                samples = link["samples"]
                sizes = [1, 16, 256, 1024]
                if key == "rate":
                    axes.plot(
                        sizes, [one["sent"] / one["seconds"] / 1e9 for one in samples], "o", color=colour, markersize=4
                    )
                    line = [one["sent"] / one["fitted"] / 1e9 for one in samples]
                else:
                    line = [100 * (one["fitted"] / one["seconds"] - 1) for one in samples]
                axes.plot(sizes, line, "--", color=colour)
                ends.append((line[-1], link["kind"].replace("_", "-"), colour))
            title = (
                "GB/s a rank sends, four H200s\ndots: measured; dashed: α–β"
                if key == "rate"
                else "α–β beside measured, %"
            )
            axes.set(title=title, xlabel="MiB", xscale="log")
            axes.set_xticks(sizes, [str(n) for n in sizes])
            axes.minorticks_off()
            plotting.name_lines(axes, HEIGHT, ends)
        plotting.save(plt, figure, file)
