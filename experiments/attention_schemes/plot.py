"""The plot, from the numbers alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import plotting

HEIGHT = 2.4


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw the share of the ideal speed, and zigzag's gain by the size of the ring.

    Raises:
        ImportError: without matplotlib.
    """
    with plotting.style() as plt:
        figure, (shares, gains) = plt.subplots(2, 1, figsize=(plotting.WIDTH, 2 * HEIGHT + 2.2), layout="constrained")
        rows = [row for row in found["readme"] if row["pass"] == "fwd+bwd"]
        names = ("ring", "zigzag", "Ulysses", "ring + Ulysses")
        series = [(row, who) for row in rows for who in ("published", "ours")]
        colours = (plotting.GREY, plotting.BLUE, "#b8b8b8", plotting.GREEN)
        for place, ((row, who), colour) in enumerate(zip(series, colours, strict=True)):
            some = [name for name in names if name in row[who]]
            values = [100 * row[who][name] / row[who]["ideal"] for name in some]
            at = [names.index(name) + 0.21 * (place - 1.5) for name in some]
            shares.bar(at, values, width=0.19, color=colour, label=f"{row['GPUs'].replace('x', ' × ')}, {who}")
            for x, value in zip(at, values, strict=True):
                shares.annotate(
                    f"{value:.0f}", (x, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8
                )
        shares.set(
            title="Forward and backward of 64K tokens on 8 GPUs,\n% of an even share of the pairs", ylim=(0, 108)
        )
        shares.set_xticks(range(len(names)), ["basic\nring", "zigzag", "Ulysses", "ring 2 ×\nUlysses 4"])
        shares.grid(axis="x", visible=False)
        ends = []
        long = [row for row in found["degrees"] if row["tokens"] > 100_000]
        for heads, colour, name in ((32, plotting.BLUE, "32 heads\nof 32"), (8, plotting.GREEN, "8 heads\nof 128")):
            those = [row for row in long if row["heads"] == heads]
            at = [8 // row["ulysses"] for row in those]
            for who, style in (("published", "o-"), ("ours", "x--")):
                line = [row[who]["zigzag"] / row[who]["basic"] for row in those]
                gains.plot(at, line, style, color=colour)
                ends.append((line[-1], f"{name}" if who == "published" else "ours", colour))
        gains.set(
            title="128K tokens, forward: zigzag's speed by the basic ring's\nsolid: published; dashed: ours",
            xscale="log",
        )
        gains.set_xlabel("ranks of the ring; the others exchange heads")
        gains.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        gains.minorticks_off()
        plotting.name_lines(gains, HEIGHT, [end for end in ends if end[1] != "ours"])
        figure.legend(*shares.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        plotting.save(plt, figure, file)
