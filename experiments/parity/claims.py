"""Claims that training in parallel is training on one device, beside losses of runs; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from trained.json by run.py; edit neither -->

# Training in parallel beside training on one process

{verdict}

{claims}

{marks}

## Runs

A GPT of four layers of 64, float32, SGD with momentum, {steps} steps on CPU ranks. *Off by*: the farthest that a loss is from that
of one process, by that loss. One process goes from {first:.4f} to {last:.4f}.

{runs}
"""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    base = {row["spec"]: row for row in found["rows"]}["1f1b"]["losses"]
    own: dict[str, list[Case]] = {
        name: [] for name in ("data", "tensor", "sequence", "pipeline", "zero_bubble", "composed")
    }
    for row in found["rows"]:
        kind = row["kind"].replace(" ", "_")
        if kind == "zero_bubble":
            differ = sum(one != other for one, other in zip(row["losses"], base, strict=True))
            own[kind].append(Case(row["spec"], 0, differ))
        else:
            own[kind].append(Case(row["spec"], 0, off(row["losses"], found["serial"])))
    learned = [Case(row["spec"], row["losses"][0] / 2, row["losses"][-1]) for row in found["rows"]]
    cases: Cases = {**own, "learned": learned}
    return read_claims(Path(__file__).parent, cases, steps=found["steps"])


def off(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the farthest that a loss is from the wanted one, by the wanted one."""
    return max(abs(one / other - 1) for one, other in zip(losses, wanted, strict=True))


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    rows = [
        [
            row["spec"],
            f"`{row['parallel']}`",
            str(row["ranks"]),
            f"{row['losses'][-1]:.7f}",
            f"{off(row['losses'], found['serial']):.0e}",
        ]
        for row in found["rows"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        steps=found["steps"],
        first=found["serial"][0],
        last=found["serial"][-1],
        runs=markdown(["run", "spec", "ranks", "last loss", "off by"], rows),
    )
