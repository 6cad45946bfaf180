"""What a linear layer moves, written down by hand for any grid: to check counts and plans against, not to make them.

Elements that one rank sends in forward and backward, by the ring algorithm, with |X| = m k, |W| = k n, |Y| = m n.
Where x and w are gathered, forward needs them once and backward once more each, unless they were kept.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod


def linear(mode: str, axes: dict[str, int], role: str, sizes: dict[str, int], *, keep: bool) -> Fraction:
    """Elements a rank sends.

    Args:
        mode: a built-in mode.
        axes: sizes of its axes.
        role: ``"column"`` or ``"row"``.
        sizes: m, k and n.
        keep: whether forward keeps gathered operands for backward.
    """
    X, W, Y = (Fraction(sizes[a] * sizes[b]) for a, b in ("mk", "kn", "mn"))
    p = prod(axes.values())
    times = 2 if keep else 3  # gather in forward, scatter its gradient, and gather again unless kept
    if mode == "1d":
        return 2 * (X if role == "column" else Y) * (p - 1) / p
    if mode == "1d+sequence":
        return (times * X if role == "column" else 2 * Y) * (p - 1) / p
    if mode in ("2d", "2.5d"):
        d, r, c = axes.get("depth", 1), axes["row"], axes["col"]
        over_depth = 2 * W / (r * c) * (d - 1) / d  # dW of the d copies: what Colossal-AI's table omits
        return times * ((c - 1) * X + d * (r - 1) * W) / p + over_depth
    a, b, c = axes["a"], axes["b"], axes["c"]
    if role == "row":
        b, c = c, b
    return (times * (c - 1) * X + times * (a - 1) * W + 2 * (b - 1) * Y) / p
