"""Claims of Tesseract, beside what was simulated and run; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, read_csv, verdict
from experiments.tensor_parity import exact_cases, runs_table
from experiments.tensor_sweep import KINDS, Rows, at_batch, batch_where, factors
from experiments.tesseract.simulated import GRIDS, settings

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Tesseract: 2.5D beside 1D and 2D on 64 GPUs

{verdict}

{claims}

{marks}

{sweeps}

## Runs

A GPT of two layers in float64 on CPU ranks, beside one process.

{runs}
"""
SWEEP = """## {name}

`{machine}`, {precision}, {layers} layers of {hidden} channels, sequences of {sequence} tokens; milliseconds a sequence.

{table}
"""
DEEP, OTHERS = "2.5d, trees", {"1d": "1d", "2d": "2d, trees"}
MAIN = "a100"


def published() -> dict[tuple[str, str, str], float]:
    """Factors by experiment, kind and what they are over."""
    rows = read_csv(Path(__file__).parent / "published.csv")
    return {(row["experiment"], row["kind"], row["over"]): float(row["factor"]) for row in rows}


def implied(rows: Rows, kind: str, factor: float) -> float:
    """The batch at which 2.5D is so many times as fast as 1D."""
    return batch_where(rows, factors(rows, kind, "1d", DEEP), factor)


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    said, sweeps = published(), found["sweeps"]
    strong = {name: implied(rows, "inference", said["strong", "speed", "1d"]) for name, rows in sweeps.items()}
    weak = {name: implied(rows, "inference", said["weak", "inference", "1d"]) for name, rows in sweeps.items()}

    def ours(name: str, kind: str, over: str, batch: float) -> float:
        return at_batch(sweeps[name], factors(sweeps[name], kind, OTHERS[over], DEEP), batch)

    def case(name: str, key: tuple[str, str, str], batch: float, kind: str) -> Case:
        return Case(f"{name}, {kind} over {key[2]}", said[key], ours(name, kind, key[2], batch))

    own: Cases = {
        "strong": [case(name, ("strong", "speed", "2d"), strong[name], "inference") for name in sweeps],
        "strong_training": [case(MAIN, ("strong", "speed", over), strong[MAIN], "training") for over in OTHERS],
        "weak_inference": [case(MAIN, ("weak", "inference", "2d"), weak[MAIN], "inference")],
        "weak_training_2d": [case(MAIN, ("weak", "training", "2d"), weak[MAIN], "training")],
        "weak_training_1d": [case(MAIN, ("weak", "training", "1d"), weak[MAIN], "training")],
        "weak_elsewhere": [
            case("rtx5000", ("weak", kind, "2d"), weak["rtx5000"], kind) for kind in ("inference", "training")
        ],
        "grows": [
            Case(f"{name}, batch {after['batch']}", now, before)
            for name, rows in sweeps.items()
            for quotients in [factors(rows, "training", "1d", DEEP)]
            for after, before, now in zip(rows[1:], quotients, quotients[1:], strict=False)
        ],
        "exact": exact_cases(found["runs"]),
        "whole": [Case(run["grid"], 1, run["projection"]) for run in found["runs"]],
        "accuracy": (),
    }
    numbers = {
        f"{which}_{name}": batch for which, by in (("strong", strong), ("weak", weak)) for name, batch in by.items()
    }
    return read_claims(Path(__file__).parent, own, **numbers)


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    sweeps = []
    for name, one in settings().items():
        rows = [
            [str(row["batch"]), *(f"{row[grid][kind]:.2f}" for grid in GRIDS for kind in KINDS)]
            for row in found["sweeps"][name]
        ]
        head = [
            "batch",
            *(f"{grid}, {'forward' if kind == 'inference' else 'both'}" for grid in GRIDS for kind in KINDS),
        ]
        sweeps.append(SWEEP.format(name=name, **vars(one), table=markdown(head, rows)))
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        sweeps="\n".join(sweeps).rstrip(),
        runs=runs_table(found["runs"]),
    )
