"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting
from experiments.optimus.claims import BATCHES, LARGEST, published, rows_by

HEIGHT = 3.2


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Sequences a second and the largest batch, by GPUs.

    Raises:
        ImportError: without matplotlib.
    """
    ours, theirs = rows_by(found), published()
    sizes = sorted(theirs["1d"])
    with plotting.style() as plt:
        figure, plots = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 1.6), layout="constrained")
        speed, batch = plots
        ends = []
        for scheme, name, colour in (
            ("1d", "1D", plotting.GREY),
            ("2d, trees", "2D,\ntrees", plotting.GREEN),
            ("2d", "2D,\nrings", plotting.BLUE),
        ):
            line = [ours[scheme, n]["training"] for n in sizes]
            speed.plot(sizes, line, "x--", color=colour)
            ends.append((line[-1], name, colour))
        for scheme, colour in (("1d", plotting.GREY), ("2d", plotting.GREEN)):
            speed.plot(sizes, [theirs[scheme][n] for n in sizes], "o-", color=colour)
        speed.set(
            title="Weak scaling\nsolid: published; dashed: ours", xlabel="GPUs", ylabel="sequences/s", ylim=(0, None)
        )
        speed.set_xticks(sizes)
        plotting.name_lines(speed, HEIGHT, ends)
        ends = []
        for scheme, name, colour in (("1d", "1D", plotting.GREY), ("2d", "2D", plotting.GREEN)):
            line = [ours[scheme, n]["batch"] for n in sizes]
            batch.plot(sizes, line, "x--", color=colour)
            batch.plot([LARGEST], [BATCHES[scheme]], "o", color=colour)
            ends.append((line[-1], name, colour))
        batch.set(
            title="Largest batch in 16 GB\ndots: published; dashed: ours",
            xlabel="GPUs",
            ylabel="sequences",
            ylim=(0, None),
        )
        batch.set_xticks(sizes)
        plotting.name_lines(batch, HEIGHT, ends)
        plotting.save(plt, figure, file)
