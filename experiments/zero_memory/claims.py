"""Claims of ZeRO, beside formulas and plans; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# ZeRO: memory and traffic, published and ours

{verdict}

{claims}

{marks}

## Table 1

GB of model states on a device, stages 1, 2 and 3: printed, and by the formulas.

{states}

## Table 2

Billions of parameters on GPUs of 32 GB: printed, and by the formulas.

{models}

## Plans

1.6 billion parameters in half precision with Adam. Elements that a rank sends in a step, times N / (N − 1), and bytes that it
holds, a parameter.

{plans}
"""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    plans = found["plans"]
    last = next(row for row in plans if (row["stage"], row["ranks"]) == (3, 64))
    whole = last["weights"] + last["gradients"] + last["optimizer"]
    own: Cases = {
        "states": [
            Case(f"{row['model']} on {row['ranks']}, stage {stage}", *pair)
            for row in found["states"]
            for stage, pair in enumerate(zip(row["published"], row["ours"], strict=True), 1)
        ],
        "models": [
            Case(f"{name} on {row['GPUs']} GPUs", row["published"][name], ours)
            for row in found["models"]
            for name, ours in row["ours"].items()
        ],
        "volume": [Case(_where(row), 3 if row["stage"] == 3 else 2, sum(row["sent"].values())) for row in plans],
        "weights": [Case(_where(row), 2, row["weights"]) for row in plans if row["stage"] < 3],
        "optimizer": [Case(_where(row), 12 / row["ranks"], row["optimizer"]) for row in plans],
        "all_states": [Case(_where(last), 16 / 64, whole)],
        "measured": (),
    }
    return read_claims(Path(__file__).parent, own, all_states=whole)


def _where(row: Mapping[str, Any]) -> str:
    return f"stage {row['stage']} on {row['ranks']} ranks"


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    states = [
        [
            row["model"],
            str(row["ranks"]),
            *(f"{a:g} / {b:.2f}" for a, b in zip(row["published"], row["ours"], strict=True)),
        ]
        for row in found["states"]
    ]
    models = [
        [str(row["GPUs"]), *(f"{row['published'][name]:g} / {ours:.1f}" for name, ours in row["ours"].items())]
        for row in found["models"]
    ]
    plans = [
        [
            str(row["stage"]),
            str(row["ranks"]),
            *(f"{row['sent'][name]:.3f}" for name in ("parameters", "gradients")),
            *(f"{row[name]:.3f}" for name in ("weights", "gradients", "optimizer")),
        ]
        for row in found["plans"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        states=markdown(["model", "N", "stage 1", "stage 2", "stage 3"], states),
        models=markdown(["GPUs", *found["models"][0]["ours"]], models),
        plans=markdown(["stage", "N", "parameters sent", "gradients sent", "weights", "gradients", "optimizer"], plans),
    )
