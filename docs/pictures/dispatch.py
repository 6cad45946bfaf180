"""The picture of dispatch: tokens of a rank, the ranks that have their experts, and the rows that go between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from matplotlib.patches import FancyBboxPatch

from meshfold.experts.counting import rank_places

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANKS, EXPERTS_EACH = 4, 2
ROUTING = ((0, 2, 3), (2, 3, 6), (4, 5, 7), (1, 6, 7))
"""The experts of each token of rank 0."""


def rows() -> list[list[int]]:
    """Return for each token the ranks that it goes to, as the library has them."""
    places, _ = rank_places(torch.tensor(ROUTING), EXPERTS_EACH, RANKS)
    return [[rank for rank in range(RANKS) if token[rank] >= 0] for token in places.tolist()]


def counts() -> tuple[int, int]:
    """Return the rows that leave rank 0, and how many pairs of a token and a remote expert they stand for."""
    sent = sum(rank != 0 for ranks in rows() for rank in ranks)
    return sent, sum(expert >= EXPERTS_EACH for experts in ROUTING for expert in experts)


def description() -> str:
    """Return what the picture shows, in words that change when it should."""
    return f"{ROUTING} on {RANKS} ranks: {rows()}; {counts()[0]} rows for {counts()[1]} pairs"


def draw() -> Figure:
    """Draw rank 0's tokens on the left, all ranks with their experts on the right, a line for each row that goes there and back."""
    from matplotlib.figure import Figure

    from meshfold.tensor_parallel.plot.paint import color

    figure = Figure(figsize=(4.9, 3.9), layout="constrained", facecolor="none")
    axes = figure.add_subplot()
    top = RANKS - 1.0
    for token, experts in enumerate(ROUTING):
        y = top - token
        _box(axes, 0.0, y, 0.24, 0.5, "#ffffff", color(token, len(ROUTING)))
        axes.text(0.12, y + 0.07, f"token {token}", ha="center", va="center", size=9, weight="bold", color="#123")
        axes.text(
            0.12, y - 0.12, f"experts {', '.join(map(str, experts))}", ha="center", va="center", size=7, color="#234"
        )
    for rank in range(RANKS):
        y = top - rank
        _box(axes, 0.58, y, 0.42, 0.74, "#e8eef7", "#6a86a8")
        axes.text(0.79, y + 0.24, f"rank {rank}", ha="center", va="center", size=9, weight="bold", color="#123")
        for place in range(EXPERTS_EACH):
            middle = 0.685 + 0.21 * place
            _box(axes, middle - 0.095, y - 0.12, 0.19, 0.36, "#ffffff", "#6a86a8")
            number = rank * EXPERTS_EACH + place
            axes.text(middle, y - 0.05, f"expert {number}", ha="center", va="center", size=7, color="#234")
            guests = [token for token, experts in enumerate(ROUTING) if number in experts]
            for at, token in enumerate(guests):
                x = middle + 0.035 * (at - (len(guests) - 1) / 2)
                axes.plot(x, y - 0.2, marker="o", markersize=4.5, color=color(token, len(ROUTING)), linewidth=0)
    for token, ranks in enumerate(rows()):
        for number, rank in enumerate(ranks):
            start = top - token + 0.1 * ((len(ranks) - 1) / 2 - number)
            end = top - rank + 0.14 * ((len(ROUTING) - 1) / 2 - token)
            axes.annotate(
                "",
                xy=(0.58, end),
                xytext=(0.24, start),
                arrowprops=dict(
                    arrowstyle="<|-|>",
                    color=color(token, len(ROUTING)),
                    linewidth=1.4,
                    linestyle="--" if rank == 0 else "-",
                    shrinkA=0,
                    shrinkB=0,
                    mutation_scale=8,
                ),
            )
    sent, pairs = counts()
    note = f"{sent} rows leave rank 0 for {pairs} pairs of a token and an expert elsewhere,\n"
    note += f"and {sent} sums come back; dashed: not sent"
    axes.text(0.5, -0.72, note, ha="center", va="center", size=8.5, color="#567")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-1.0, top + 0.45)
    axes.set_axis_off()
    return figure


def _box(axes: Axes, left: float, middle: float, width: float, height: float, face: str, edge: object) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left, middle - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.02",
            mutation_aspect=4,
            facecolor=face,
            edgecolor=edge,
            linewidth=1.2,
        )
    )
