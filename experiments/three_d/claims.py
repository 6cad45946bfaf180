"""Claims of 3D parallelism, beside what was simulated and run; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, read_csv, verdict
from experiments.tensor_parity import exact_cases, runs_table
from experiments.tensor_sweep import KINDS, Rows, at_batch, batch_where, factors
from experiments.three_d.simulated import GRIDS, setting

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# 3D parallelism beside 1D and 2D on 64 GPUs

{verdict}

{claims}

{marks}

## Times

V100s, four a node, {precision}, {layers} layers of {hidden} channels, sequences of {sequence} tokens; milliseconds a sequence.

{sweep}

## Run

A GPT of two layers in float64 on CPU ranks, beside one process.

{runs}
"""
CUBE, TWO = "3d", "2d, trees"
NEVER = 1e-3  # in place of a factor at a batch that no sweep reaches


def published() -> dict[str, float]:
    """Factors by what they are over."""
    return {row["over"]: float(row["factor"]) for row in read_csv(Path(__file__).parent / "published.csv")}


def implied(rows: Rows) -> float:
    """The batch at which 3D is as many times as fast as 2D as was published."""
    return batch_where(rows, factors(rows, "training", TWO, CUBE), published()["2d"])


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    rows, said = found["sweep"], published()
    batch = implied(rows)

    def ours(over: str, of: str) -> float:
        return at_batch(rows, factors(rows, "training", over, of), batch)

    own: Cases = {
        "over_1d": [Case("64 GPUs", said["1d"], ours("1d", CUBE))],
        "order": [
            Case("2D in 3D", 1, 1 / (ours(TWO, CUBE) or NEVER)),
            Case("1D in 2D", 1, 1 / (ours("1d", TWO) or NEVER)),
        ],
        "two_over_1d": [Case("64 GPUs", said["1d"] / said["2d"], ours("1d", TWO))],
        "rings": [Case("64 GPUs", 1, max(factors(rows[-3:], "training", "2d", CUBE)))],
        "exact": exact_cases(found["runs"]),
        "whole": [Case(run["grid"], 1, run["projection"]) for run in found["runs"]],
    }
    numbers = dict(batch=batch, most=max(factors(rows, "training", "1d", CUBE)))
    return read_claims(Path(__file__).parent, own, **numbers)


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    one = setting()
    rows = [
        [str(row["batch"]), *(f"{row[grid][kind]:.2f}" for grid in GRIDS for kind in KINDS)] for row in found["sweep"]
    ]
    head = ["batch", *(f"{grid}, {'forward' if kind == 'inference' else 'both'}" for grid in GRIDS for kind in KINDS)]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        **vars(one),
        sweep=markdown(head, rows),
        runs=runs_table(found["runs"]),
    )
