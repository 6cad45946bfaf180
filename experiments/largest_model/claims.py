"""Claims of the benchmark of large models, beside plans; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# The largest model on one GPU, published and planned

{verdict}

{claims}

{marks}

## The table

{rows}

## Around the largest

One A100 of 40 GB, 500 GB of host memory.

{tried}
"""
STEP = 28
"""Bytes a parameter that a step with float16 and Adam reads and writes in the host's memory."""


def largest(found: Mapping[str, Any]) -> dict[str, float]:
    """Billions of parameters of the largest model that fits on one GPU, by placement."""
    return {
        placement: max(
            row["parameters"] / 1e9 for row in found["tried"] if row["placement"] == placement and row["fits"]
        )
        for placement in ("cpu", "auto")
    }


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    rows = {row["strategy"]: row for row in found["rows"]}
    most = largest(found)
    alone = rows["gemini-auto"]

    def gb(strategy: str) -> list[Case]:
        return [Case(strategy, rows[strategy]["published"]["GB"], rows[strategy]["ours"]["GB"])]

    own: Cases = {
        "fits": [Case("24B", 1.0, float(alone["ours"]["fits"]))],
        "more": [Case("largest", most["auto"], most["cpu"])],
        "offload": [Case("everything on the host", 18, most["cpu"]), Case("planned", 24, most["auto"])],
        "zero": gb("zero3"),
        "gemini": gb("gemini"),
        "seconds": [Case(name, row["published"]["seconds"], row["ours"]["seconds"]) for name, row in rows.items()],
    }
    ours = [row["ours"]["seconds"] for row in found["rows"]]
    return read_claims(
        Path(__file__).parent,
        own,
        gpu=alone["ours"]["GB"],
        host=alone["ours"]["host GB"],
        static=most["cpu"],
        auto=most["auto"],
        shortest=min(ours),
        longest=max(ours),
        rate=STEP * alone["ours"]["parameters"] / alone["published"]["seconds"] / 1e9,
    )


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    rows = [
        [
            row["strategy"],
            str(row["gpus"]),
            row["model"],
            *(f"{row[who][key]:.1f}" for key in ("GB", "seconds") for who in ("published", "ours")),
            f"{row['ours']['host GB']:.0f}",
        ]
        for row in found["rows"]
    ]
    tried = [
        [
            row["placement"],
            row["model"],
            f"{row['parameters'] / 1e9:.1f}",
            *(
                [f"{row['GB']:.1f}", f"{row['host GB']:.0f}", f"{row['seconds']:.1f}"]
                if row["fits"]
                else ["does not fit", "", ""]
            ),
        ]
        for row in found["tried"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        rows=markdown(["strategy", "GPUs", "model", "GB", "ours", "s", "ours", "host GB, ours"], rows),
        tried=markdown(["placement", "model", "billions", "GB", "host GB", "s"], tried),
    )
