"""Claims of Ring Attention, beside arithmetic, the clock and plans; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, NONE, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Ring Attention: blocks and lengths, published and ours

{verdict}

{claims}

{marks}

## Table 2

Thousands of tokens: published, by the formula, and of a block on the clock.

{blocks}

## Table 3

The published length and GB of a GPU of 80 GB (of which the planner's has {room:.0f}), planned at this length and, without
a ring, at twice as much.

{lengths}
"""
ROOM = 79 * 2**30 / 1e9


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    eight = [row for row in found["lengths"] if row["gpus"] == 8]
    more = [row for row in found["lengths"] if row["gpus"] > 8]
    clock = {row["host"]: row["clock"] for row in found["blocks"] if "clock" in row}

    def fit(row: Mapping[str, Any], one: Mapping[str, Any], wanted: bool) -> Case:
        return Case(f"{row['model']} on {row['gpus']}, {one['tokens'] // 1024}K", float(wanted), float(one["fits"]))

    last = {(row["gpus"], row["model"]): row["blockwise"][0] for row in found["lengths"]}
    own: Cases = {
        "blocks": [
            Case(f"{row['host']}, {what}", *pair)
            for row in found["blocks"]
            for what, pair in zip(("block", "sequence"), zip(row["published"], row["ours"], strict=True), strict=True)
        ],
        "clock": [Case(row["host"], row["published"][0], row["clock"]) for row in found["blocks"] if "clock" in row],
        "fits": [fit(row, row[scheme][0], True) for row in eight for scheme in ("blockwise", "ring")],
        "twice": [fit(row, row["blockwise"][1], False) for row in eight],
        "flat": [
            Case(f"{row['model']}, {one['tokens'] // 1024}K", alone["GB"], one["GB"])
            for row in eight
            for alone, one in zip(row["blockwise"], row["ring"], strict=False)
        ],
        "more": [fit(row, row["blockwise"][0], True) for row in more],
        "others": (),
    }
    per_token = (eight[-1]["blockwise"][1]["GB"] - eight[-1]["blockwise"][0]["GB"]) / eight[-1]["published"][
        "blockwise"
    ]
    states = eight[-1]["blockwise"][0]["GB"] - per_token * eight[-1]["published"]["blockwise"]
    slope = (more[-1]["blockwise"][1]["GB"] - more[-1]["blockwise"][0]["GB"]) / more[-1]["published"]["blockwise"]
    fewer = last[32, "13B"]["GB"] - slope * more[-1]["published"]["blockwise"]
    return read_claims(
        Path(__file__).parent,
        own,
        nvlink=clock["A100 NVLink"],
        infiniband=clock["A100 InfiniBand"],
        saved=states - fewer,
        seven=eight[1]["blockwise"][1]["GB"],
        thirteen=eight[2]["blockwise"][1]["GB"],
    )


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    blocks = [
        [
            row["host"],
            *(f"{number:.1f}" for pair in zip(row["published"], row["ours"], strict=True) for number in pair),
            f"{row['clock']:.1f}" if "clock" in row else NONE,
        ]
        for row in found["blocks"]
    ]
    lengths = [
        [
            str(row["gpus"]),
            row["model"],
            scheme,
            f"{row['published'][scheme]}K",
            *(f"{one['GB']:.1f}{'' if one['fits'] else ', does not fit'}" for one in row.get(scheme, [])),
            *[NONE] * (2 - len(row.get(scheme, []))),
        ]
        for row in found["lengths"]
        for scheme in ("blockwise", "ring")
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        room=ROOM,
        blocks=markdown(["host", "block", "ours", "sequence", "ours", "block on the clock"], blocks),
        lengths=markdown(["GPUs", "model", "scheme", "published", "GB", "GB at twice the length"], lengths),
    )
