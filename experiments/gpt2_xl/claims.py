"""Claims of the benchmark of GPT2-XL, beside plans; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.planned import GB
from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# GPT2-XL on four A100s of 40 GB, published and planned

{verdict}

{claims}

{marks}

## The table

*Whole logits*: with the loss of `kernels="off"`, which has all logits in memory.

{rows}

By the plans, {ddp} sequences a GPU fit under DDP and {zero3} with sharded states, in {limit:.1f} GB.
"""
BUCKETS = 4
"""Bytes a parameter of torch's DDP, which copies float32 gradients into buckets (``gradient_as_bucket_view`` is off by default)."""
GPUS, TOKENS = 4, 1024


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    rows = {row["strategy"]: row for row in found["rows"]}
    ddp, sharded = rows["ddp"], [rows["zero3"], rows["gemini"]]
    most = found["largest"]
    pairs = list(pairwise(rows.values()))
    parameters = ddp["ours"]["parameters"]

    def gain(row: Mapping[str, Any], who: str) -> float:
        return float(row[who]["samples/s"] / ddp[who]["samples/s"])

    own: Cases = {
        "order": [
            Case(f"{less['strategy']}, {more['strategy']}", more["ours"]["samples/s"], less["ours"]["samples/s"])
            for less, more in pairs
        ],
        "memory": [Case(row["strategy"], ddp["ours"]["GB"], row["ours"]["GB"]) for row in sharded],
        "ddp": [Case("ddp", ddp["published"]["GB"], ddp["whole logits"]["GB"] + BUCKETS * parameters / GB)],
        "room": [Case("sequences a GPU", most["zero3"], most["ddp"])],
        "gain": [Case(row["strategy"], gain(row, "published"), gain(row, "ours")) for row in sharded],
        "speed": [Case(name, row["published"]["samples/s"], row["ours"]["samples/s"]) for name, row in rows.items()],
        "sharded": [Case(row["strategy"], row["published"]["GB"], row["ours"]["GB"]) for row in sharded],
    }
    return read_claims(
        Path(__file__).parent,
        own,
        ddp=ddp["ours"]["GB"],
        whole=ddp["whole logits"]["GB"],
        sharded=sharded[0]["ours"]["GB"],
        sharded_whole=sharded[0]["whole logits"]["GB"],
        ddp_rows=most["ddp"],
        sharded_rows=most["zero3"],
        fixed=fixed_seconds(ddp, rows["gemini"], "published"),
        optimizer=fixed_seconds(ddp, rows["gemini"], "ours"),
        theirs=8 * parameters * TOKENS * rows["gemini"]["published"]["samples/s"] / GPUS / 1e12,
        ours=rows["gemini"]["ours"]["TFLOP/s"],
    )


def fixed_seconds(few: Mapping[str, Any], many: Mapping[str, Any], who: str) -> float:
    """Return the seconds of a step that do not grow with its sequences, on the line through two rows."""
    (less, first), (more, second) = ((row["batch"], row["batch"] / row[who]["samples/s"]) for row in (few, many))
    return float(first - less * (second - first) / (more - less))


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    rows = [
        [
            row["strategy"],
            str(row["batch"]),
            *(f"{row[who]['samples/s']:.1f}" for who in ("published", "ours", "whole logits")),
            *(f"{row[who]['GB']:.1f}" for who in ("published", "ours", "whole logits")),
        ]
        for row in found["rows"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        rows=markdown(
            ["strategy", "sequences", "samples/s", "ours", "whole logits", "GB", "ours", "whole logits"], rows
        ),
        **found["largest"],
        limit=found["limit"],
    )
