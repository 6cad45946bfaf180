"""Claims of MegaScale, beside what was simulated; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.report import MARKS, NONE, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# MegaScale on 256 to 12,288 GPUs, published and on the clock

{verdict}

{claims}

{marks}

## Table 2

Model FLOP utilisation of 175 billion parameters in per cent.

{second}

## Table 3

On 256 GPUs with 256 sequences a step; each row has the changes of those above it.

{third}
"""
LARGEST = 12_288


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    rows, changes = found["table 2"], found["table 3"]

    def cases(method: str, chosen: Sequence[int]) -> list[Case]:
        return [
            Case(f"{row['GPUs']} GPUs", row["published"]["MFU"], row["ours"]["MFU"])
            for row in rows
            if row["method"] == method and row["GPUs"] in chosen
        ]

    sizes = sorted({row["GPUs"] for row in rows})
    ours, theirs = (next(iter(cases(name, [LARGEST]))) for name in ("MegaScale", "Megatron-LM"))
    first = [row for row in changes if row["row"] <= 6]
    batch = changes[-1]
    own: Cases = {
        "megatron": cases("Megatron-LM", sizes[:-1]),
        "megatron_on_12288": [theirs],
        "megascale": cases("MegaScale", sizes[1:]),
        "megascale_on_256": cases("MegaScale", sizes[:1]),
        "faster": [Case("quotient", ours.published / theirs.published, ours.ours / theirs.ours)],
        "ablation": [Case(row["method"], row["published"], row["ours"]) for row in first],
        "each_gains": [Case(after["method"], after["ours"], before["ours"]) for before, after in pairwise(first)],
        "three_times_the_batch": [
            Case("quotient", batch["published"] / changes[-2]["published"], batch["ours"] / first[-1]["ours"])
        ],
        "operators": (),
    }
    return read_claims(Path(__file__).parent, own)


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    second = [
        [
            row["method"],
            str(row["GPUs"]),
            str(row["batch"]),
            f"{row['published']['seconds']:.2f}",
            f"{row['ours']['seconds']:.2f}",
            f"{row['published']['MFU']:.1%}",
            f"{row['ours']['MFU']:.1%}",
        ]
        for row in found["table 2"]
    ]
    third = [
        [row["method"], f"{row['published']:.1%}", f"{row['ours']:.1%}" if "ours" in row else NONE]
        for row in found["table 3"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        second=markdown(["method", "GPUs", "sequences", "s", "ours", "MFU", "ours"], second),
        third=markdown(["change", "MFU", "ours"], third),
    )
