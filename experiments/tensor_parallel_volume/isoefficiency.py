"""How fast a problem must grow with the ranks to keep its efficiency, from counted volumes.

A layer with as many tokens as hidden elements, b s = h, multiplies W ~ h³ and moves V ~ h² elements a rank (counted
at h and at 2 h: exactly four times as much). Efficiency stays the same while all ranks' traffic p V stays the same
share of W, so h must grow like p V(p, h₀) / h₀², and W like its cube.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from experiments.tensor_parallel_volume.config import side
from experiments.tensor_parallel_volume.published import published
from experiments.tensor_parallel_volume.records import Record, Results

TAIL = 64  # the fit starts here: below, (g − 1)/g of small groups bends every curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Problem sizes for constant efficiency.

    Attributes:
        name: of the mode and what was counted.
        law: the closed form that the points follow exactly, up to a constant factor.
        points: ranks to W, relative to the first.
        exact: whether they do follow it.
    """

    name: str
    law: str
    points: dict[int, Fraction]
    exact: bool

    @property
    def exponent(self) -> float:
        """Slope of log W over log p, by least squares over the tail."""
        return slope({p: w for p, w in self.points.items() if p >= TAIL})


def curves(results: Results) -> list[Curve]:
    """Every curve of the experiment.

    Raises:
        ValueError: if a volume does not grow with the square of the hidden size.
    """
    found = [
        _curve(results, "1D", "1d", "(p − 1)³", lambda p, q: p - 1),
        _curve(results, "1D + sequence", "1d+sequence", "(p − 1)³", lambda p, q: p - 1),
        _curve(results, "2D, rings", "2d", "(√p − 1)³", lambda p, q: q - 1),
        _curve(results, "2D, SUMMA's broadcasts, forward", "2d", "√p³", lambda p, q: q, broadcasts=True),
        _curve(results, "3D", "3d", "(∛p − 1)³", lambda p, q: q - 1),
    ]
    tree = _times_tree(found[3])
    return [*found[:4], tree, found[4]]


def paper(formula: str, points: dict[int, Fraction]) -> dict[int, Fraction]:
    """A published W(p) at the same ranks, relative to the first."""
    values = {p: published()[formula].value(P=p) for p in points}
    first = next(iter(values.values()))
    return {p: value / first for p, value in values.items()}


def slope(points: dict[int, Fraction]) -> float:
    """Least squares in log-log.

    Raises:
        ValueError: for fewer than two points.
    """
    if len(points) < 2:
        raise ValueError(f"a slope needs two points, not {len(points)}: count more ranks")
    x = [math.log(p) for p in points]
    y = [math.log(w) for w in points.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def _curve(
    results: Results,
    name: str,
    mode: str,
    law: str,
    load_of: Callable[[int, int], int],
    *,
    broadcasts: bool = False,
) -> Curve:
    """A mode's curve; ``load_of(p, q)`` is what p V is expected to follow, up to a factor."""
    lowering, phase = ("stream", "forward") if broadcasts else ("gather", "")
    load: dict[int, Fraction] = {}
    expected: dict[int, int] = {}
    for record in results.find(what="isoefficiency", mode=mode, shape="1", lowering=lowering):
        doubled = results.one(what="isoefficiency", axes=record.axes, mode=mode, shape="2", lowering=lowering)
        _check_degree(record, doubled, phase)
        load[record.ranks] = record.ranks * record.elements(phase, "matmul")
        expected[record.ranks] = load_of(record.ranks, side(record.axes))
    first = next(iter(load))
    points = {p: (value / load[first]) ** 3 for p, value in load.items()}
    exact = all(value * expected[first] == load[first] * expected[p] for p, value in load.items())
    return Curve(name=name, law=law, points=points, exact=exact)


def _check_degree(record: Record, doubled: Record, phase: str) -> None:
    if doubled.elements(phase, "matmul") != 4 * record.elements(phase, "matmul"):
        raise ValueError(f"mode {record.mode} on {record.axes}: twice the hidden size is not four times the volume")


def _times_tree(broadcasts: Curve) -> Curve:
    """Every broadcast charged log₂ √p times, once for each level of a tree, as Optimus counts it."""
    levels = {p: Fraction(int(math.log2(p)), 2) for p in broadcasts.points}
    first = next(iter(levels.values()))
    points = {p: w * (levels[p] / first) ** 3 for p, w in broadcasts.points.items()}
    exact = points == paper("isoefficiency-2d", points)
    return Curve(name="2D, SUMMA's broadcasts as trees", law="(√p log₂ p)³", points=points, exact=exact)
