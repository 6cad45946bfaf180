"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 2.8


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw step time against memory.

    Raises:
        ImportError: without matplotlib.
    """
    rows, first = found["budgets"], found["budgets"][0]["seconds"]
    with plotting.style() as plt:
        figure, axes = plt.subplots(figsize=(plotting.WIDTH, HEIGHT + 1.2), layout="constrained")
        axes.plot([row["GB"] for row in rows], [row["seconds"] / first for row in rows], "x-", color=plotting.BLUE)
        axes.plot(
            [row["GB"] for row in found["published"]],
            [row["by_first"] for row in found["published"]],
            "o--",
            color=plotting.GREY,
        )
        ran = found["measured"]
        axes.plot(
            [row["GB"] for row in ran], [row["seconds"] / ran[0]["seconds"] for row in ran], "s-", color=plotting.GREEN
        )
        axes.annotate(
            "measured\non an H100",
            (ran[1]["GB"], 1.0),
            xytext=(-86, -2),
            textcoords="offset points",
            color=plotting.GREEN,
            weight="bold",
        )
        axes.annotate(
            "planned",
            (rows[2]["GB"], rows[2]["seconds"] / first),
            xytext=(-34, -16),
            textcoords="offset points",
            color=plotting.BLUE,
            weight="bold",
        )
        axes.annotate(
            "published,\nits two ends",
            (38, 1.089),
            xytext=(6, 8),
            textcoords="offset points",
            color=plotting.GREY,
            weight="bold",
        )
        axes.set(
            title=f"GPT2-medium, {found['batch']} sequences:\nstep time by that within 53 GB",
            xlabel="GB of the GPU",
            ylabel="step time",
            xlim=(0, 57),
        )
        plotting.save(plt, figure, file)
