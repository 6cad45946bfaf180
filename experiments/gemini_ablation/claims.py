"""Claims on what each technique adds, beside the clock and runs; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.gemini_ablation.simulated import NODE, STAGES
from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Techniques of offloading, one after the other

{verdict}

{claims}

{marks}

## On the clock

An A100 of {gib:g} GB with {host:g} GB of host memory, half precision, sequences of 1024 tokens, all blocks recomputed. Each row
has the techniques of those above it. *none*: parameters and states on the host, and compute waits for every copy.

{rows}

## Trained

Losses of a small GPT on the CPU.

{losses}
"""
GAIN = 3.4
"""Elixir's abstract."""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    seconds: dict[str, dict[str, float]] = {}
    for row in found["rows"]:
        seconds.setdefault(row["model"], {})[row["stage"]] = row["seconds"]
    wanted, *others = found["losses"].items()
    gains = {model: by["none"] / by["hybrid Adam"] for model, by in seconds.items()}
    own: Cases = {
        "monotone": [
            Case(f"{model}, {after}", by[before], by[after])
            for model, by in seconds.items()
            for before, after in pairwise(STAGES)
        ],
        "copies": [Case(model, by["cache"], by["prefetch"]) for model, by in seconds.items()],
        "gain": [Case(model, GAIN, gain) for model, gain in gains.items()],
        "same": [
            Case(name, 0, sum(one != other for one, other in zip(losses, wanted[1], strict=True)))
            for name, losses in others
        ],
    }
    return read_claims(Path(__file__).parent, own, least=min(gains.values()), most=max(gains.values()))


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    rows = [
        [row["model"], row["stage"], f"{row['seconds']:.3f}", f"{row['GB']:.1f}", f"{row['host GB']:.0f}"]
        for row in found["rows"]
    ]
    losses = [[name, *(f"{loss:.6f}" for loss in run)] for name, run in found["losses"].items()]
    steps = [str(step) for step in range(1, len(losses[0]))]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        gib=NODE.gpu_gib,
        host=NODE.host_gb,
        rows=markdown(["model", "with", "s", "GB", "host GB"], rows),
        losses=markdown(["placement", *steps], losses),
    )
