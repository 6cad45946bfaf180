"""Claims of the paper, beside what was counted and simulated; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Selective recomputation: memory and time, published and ours

{verdict}

{claims}

{marks}

## Table 2

MiB that a layer of the model of 22 billion parameters keeps on one of eight ranks, four sequences of 2048 tokens.

{kept}

## Table 4

Milliseconds of that layer.

{layer}

## Table 5

Seconds of a step, with full recomputation, and with selective recomputation and sequence parallelism.

{steps}
"""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    layer = {row["scheme"]: row for row in found["layer"]}
    changed = [name for name in layer if name != "nothing recomputed"]
    cheaper = [("selective", "full"), ("selective + sequence parallel", "selective")]
    own: Cases = {
        "bytes": [Case(row["scheme"], row["formula"], row["counted"]) for row in found["bytes"]],
        "overhead": [
            Case(name, layer[name]["published"]["overhead"], layer[name]["ours"]["overhead"]) for name in changed
        ],
        "order": [
            Case(f"{less}, {more}", layer[more]["ours"]["combined"], layer[less]["ours"]["combined"])
            for less, more in cheaper
        ],
        "layer": [Case(name, row["published"]["combined"], row["ours"]["combined"]) for name, row in layer.items()],
        "gain": [Case(row["model"], row["published"]["gain"], row["ours"]["gain"]) for row in found["steps"]],
        "steps": [
            Case(f"{row['model']}, {which}", row["published"][which], row["ours"][which])
            for row in found["steps"]
            for which in ("full", "present")
        ],
    }
    more = {name: layer[name]["ours"]["overhead"] for name in changed}
    return read_claims(
        Path(__file__).parent,
        own,
        full=more["full"],
        selective=more["selective"],
        both=more["selective + sequence parallel"],
        alone=more["sequence parallel"],
    )


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    kept = [
        [row["scheme"], f"{row['formula'] / 2**20:,.1f}", f"{row['counted'] / 2**20:,.1f}"] for row in found["bytes"]
    ]
    layer = [
        [
            row["scheme"],
            *(f"{row[who][key]:.1f}" for key in ("forward", "backward", "combined") for who in ("published", "ours")),
            *(f"{row[who]['overhead']:.1%}" for who in ("published", "ours")),
        ]
        for row in found["layer"]
    ]
    steps = [
        [
            row["model"],
            *(f"{row[who][key]:.2f}" for key in ("full", "present") for who in ("published", "ours")),
            *(f"{row[who]['gain']:.1%}" for who in ("published", "ours")),
        ]
        for row in found["steps"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        kept=markdown(["scheme", "formula", "counted"], kept),
        layer=markdown(["scheme", "forward", "ours", "backward", "ours", "together", "ours", "more", "ours"], layer),
        steps=markdown(["model", "full", "ours", "present", "ours", "gain", "ours"], steps),
    )
