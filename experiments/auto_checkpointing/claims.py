"""Claims of Colossal-AI's automatic checkpointing, beside plans; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.report import MARKS, NONE, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Automatic recomputation under a budget, published and planned

{verdict}

{claims}

{marks}

## GPT2-medium, {batch} sequences of 1024 tokens

Step time by that at the largest budget.

{budgets}

With nothing recomputed, a step takes {whole:.3f} s and {whole_gb:.1f} GB, with all blocks
recomputed {blocks:.3f} s and {blocks_gb:.1f} GB.

## Measured on an H100

The same model and batch ([measured.md](measured.md)), beside the plan for that GPU.

{measured}
"""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    rows = found["budgets"]
    first, last = found["published"]
    ours = rows[-1]["seconds"] / rows[0]["seconds"]
    ran = found["measured"]
    really = ran[-1]["seconds"] / ran[0]["seconds"]
    own: Cases = {
        "budget": [Case(_where(row), row["budget"], row["GB"]) for row in rows],
        "lowest": [Case(_where(rows[-1]), last["by_first"] / first["by_first"], ours)],
        "monotone": [Case(_where(more), less["seconds"], more["seconds"]) for more, less in pairwise(rows)],
        "blocks": [Case(_where(row), found["blocks"]["seconds"], row["seconds"]) for row in rows],
        "measured_budget": [Case(_where(row), row["budget"], row["GB"]) for row in ran],
        "measured_lowest": [Case(_where(ran[-1]), last["by_first"] / first["by_first"], really)],
        "foreseen": [Case(_where(row), row["seconds"], row["planned"]["seconds"]) for row in ran],
        "room": [Case(_where(row), row["planned"]["GB"], row["GB"]) for row in ran],
        "resnet": (),
    }
    numbers = dict(ours=ours, batch=found["batch"], blocks=found["blocks"]["GB"], really=really)
    return read_claims(Path(__file__).parent, own, **numbers)


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['budget']:g} GB"


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    printed = {row["GB"]: row["by_first"] for row in found["published"]}
    first = found["budgets"][0]["seconds"]
    rows = [
        [
            f"{row['budget']:g}",
            f"{row['GB']:.1f}",
            f"{row['seconds']:.3f}",
            f"{row['seconds'] / first:.3f}",
            f"{printed[row['budget']]:.2f}" if row["budget"] in printed else NONE,
        ]
        for row in found["budgets"]
    ]
    begun = found["measured"][0]["seconds"]
    measured = [
        [
            f"{row['budget']:g}",
            *(f"{one['GB']:.1f}" for one in (row, row["planned"])),
            *(f"{one['seconds']:.3f}" for one in (row, row["planned"])),
            f"{row['seconds'] / begun:.2f}",
        ]
        for row in found["measured"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        batch=found["batch"],
        budgets=markdown(["budget, GB", "planned GB", "s", "by the first", "published"], rows),
        measured=markdown(["budget, GB", "GB", "planned", "s", "planned", "by the first"], measured),
        whole=found["whole"]["seconds"],
        whole_gb=found["whole"]["GB"],
        blocks=found["blocks"]["seconds"],
        blocks_gb=found["blocks"]["GB"],
    )
