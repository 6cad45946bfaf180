"""Claims of PatrickStar's chart, beside plans; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.patrickstar.simulated import ROWS, SEARCHED
from experiments.report import MARKS, NONE, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# PatrickStar: models and speed, published and planned

{verdict}

{claims}

{marks}

## Plans

GPUs of 32 GB, 240 GB of host memory for all of them, {rows} sequences of 1024 tokens a GPU, all blocks recomputed. TFLOP/s are of
all GPUs.

{plans}

The search for a chunk size leaves {waste:.3%} of the chunks of {searched} billion parameters empty.
"""
LARGEST = {1: 12, 8: 18}
"""Billions of parameters of the chart's largest model, by GPUs."""
SCALE, SHARE = 2.27, 0.05
"""The abstract's factor over DeepSpeed; the share of chunks that may be empty."""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    ours = {(row["placement"], row["gpus"], row["billions"]): row for row in found["rows"]}
    theirs = labels(found)

    def most(placement: str, gpus: int) -> int:
        fitting: list[int] = [
            n for (where, count, n), row in ours.items() if (where, count) == (placement, gpus) and row["fits"]
        ]
        return max(fitting)

    quotient = theirs[8, 15] / theirs[8, 8]
    own: Cases = {
        "fits": [Case(f"{n}B on {g}", 1.0, float(ours["planned", g, n]["fits"])) for g, n in LARGEST.items()],
        "largest": [Case(f"{g} GPUs", n, most("planned", g)) for g, n in LARGEST.items()],
        "more": [Case(f"{g} GPUs", most("planned", g), most("host", g)) for g in LARGEST],
        "scale": [Case("1 GPU", SCALE, most("planned", 1) / most("host", 1))],
        "speed": [
            Case(f"{n}B on {g}", value, ours["planned", g, n]["TFLOPS"])
            for (g, n), value in theirs.items()
            if ("planned", g, n) in ours and ours["planned", g, n]["fits"]
        ],
        "flat": [Case("15B by 8B", quotient, ours["planned", 8, 15]["TFLOPS"] / ours["planned", 8, 8]["TFLOPS"])],
        "waste": [Case(f"{SEARCHED}B", SHARE, found["waste"])],
        "a100": (),
    }
    alone = ours["planned", 1, LARGEST[1]]
    return read_claims(
        Path(__file__).parent,
        own,
        gb=alone["GB"],
        host=alone["host GB"],
        one=most("planned", 1),
        eight=most("planned", 8),
        ratio=most("planned", 1) / most("host", 1),
        static=most("host", 1),
        billions=SEARCHED,
        waste=found["waste"],
    )


def labels(found: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """Return the chart's TFLOP/s of the first testbed, by GPUs and billions of parameters."""
    return {
        (row["gpus"], row["billions"]): row["TFLOPS"]
        for row in found["published"]
        if (row["testbed"], row["system"]) == ("v100", "PatrickStar")
    }


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    theirs = labels(found)
    rows = [
        [
            str(row["gpus"]),
            str(row["billions"]),
            row["placement"],
            *(
                [f"{row['GB']:.1f}", f"{row['host GB']:.0f}", f"{row['TFLOPS']:.0f}"]
                if row["fits"]
                else ["does not fit", NONE, NONE]
            ),
            f"{theirs[key]:g}"
            if (key := (row["gpus"], row["billions"])) in theirs and row["placement"] == "planned"
            else NONE,
        ]
        for row in found["rows"]
    ]
    head = ["GPUs", "billions", "placement", "GB", "host GB", "TFLOP/s", "published"]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        rows=ROWS,
        plans=markdown(head, rows),
        waste=found["waste"],
        searched=SEARCHED,
    )
