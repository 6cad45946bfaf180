"""Claims on α–β, beside the fits; and the page that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.collectives.simulated import MACHINE, RANKS
from experiments.report import Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Collectives by α–β

{verdict}

{claims}

**ours**: measured with this code.

## Links of {ranks} H200s

The planner's `{machine}` has {latency:.0f} µs and {rate:.0f} GB/s for all kinds.

{links}
"""
FEW = ("shift", "all_gather")
"""Kinds that α–β does not tell within a tenth."""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    links = {link["kind"]: link for link in found["links"]}
    preset = found["preset"]
    large = [(kind, link["samples"][-1]) for kind, link in links.items()]
    own: Cases = {
        "unseen": [Case(kind, 0, link["unseen"]) for kind, link in links.items() if kind not in FEW],
        "unseen_all_gather": [Case("all_gather", 0, links["all_gather"]["unseen"])],
        "unseen_shift": [Case("shift", 0, links["shift"]["unseen"])],
        "preset_rate": [
            Case(kind, one["seconds"], preset["latency"] + one["sent"] / preset["rate"]) for kind, one in large
        ],
        "preset_latency": [Case(kind, link["latency"], preset["latency"]) for kind, link in links.items()],
    }
    return read_claims(Path(__file__).parent, own)


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    preset = found["preset"]
    rows = [
        [
            link["kind"].replace("_", "-"),
            f"{1e6 * link['latency']:.1f}",
            f"{link['rate'] / 1e9:.0f}",
            f"{link['unseen']:.1%}",
            *(f"{one['fitted'] / one['seconds'] - 1:+.1%}" for one in link["samples"]),
        ]
        for link in found["links"]
    ]
    head = ["collective", "α, µs", "β, GB/s", "unseen sizes", "1 MiB", "16 MiB", "256 MiB", "1 GiB"]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        ranks=RANKS,
        machine=MACHINE,
        latency=1e6 * preset["latency"],
        rate=preset["rate"] / 1e9,
        links=markdown(head, rows),
    )
