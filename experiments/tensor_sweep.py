"""Grids of the same ranks beside each other, over batches: seconds a sequence, and what a published factor implies.

Where a paper gives a factor but not its sizes, the factor depends on the tokens of a batch above all: activations grow with them,
weights do not. One published factor tells the batch, and the others can be compared there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from experiments.tensor_layers import Grid, Size, seconds, trace
from meshfold.planner import Machine

KINDS = ("inference", "training")
Rows = Sequence[Mapping[str, Any]]


def sweep(
    grids: Mapping[str, Grid], size: Size, batches: Sequence[int], machine: Machine, layers: int
) -> list[dict[str, Any]]:
    """Milliseconds a sequence of a stack, by batch and grid: of a forward, and of a forward and backward without recomputation.

    Args:
        grids: by name; one whose name ends in ``trees`` is charged so.
        size: of a layer.
        batches: sequences of all ranks.
        machine: that runs it.
        layers: of the stack.
    """
    rows = []
    for batch in batches:
        row: dict[str, Any] = {"batch": batch}
        for name, grid in grids.items():
            there = replace(size, batch=batch)
            found = seconds(trace(grid, there), grid, there, machine, trees=name.endswith("trees"))
            times = (found.inference, found.training(recompute=False))
            row[name] = {kind: 1e3 * layers * time / batch for kind, time in zip(KINDS, times, strict=True)}
        rows.append(row)
    return rows


def factors(rows: Rows, kind: str, over: str, of: str) -> list[float]:
    """How many times as fast a grid is as another, by batch."""
    return [row[over][kind] / row[of][kind] for row in rows]


def batch_where(rows: Rows, values: Sequence[float], target: float) -> float:
    """The batch at which values by batch reach the target, on lines between the logarithms of batches; NaN if none does."""
    for (row, low), (after, high) in pairwise(zip(rows, values, strict=True)):
        if min(low, high) <= target <= max(low, high):
            share = (target - low) / (high - low)
            return math.exp((1 - share) * math.log(row["batch"]) + share * math.log(after["batch"]))
    return math.nan


def at_batch(rows: Rows, values: Sequence[float], batch: float) -> float:
    """A value at a batch, on the same lines; 0 at NaN."""
    for (row, low), (after, high) in pairwise(zip(rows, values, strict=True)):
        if row["batch"] <= batch <= after["batch"]:
            share = math.log(batch / row["batch"]) / math.log(after["batch"] / row["batch"])
            return low + share * (high - low)
    return 0.0
