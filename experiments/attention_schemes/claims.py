"""Claims of published attention benchmarks, beside what was counted; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.attention_schemes.counting import PASSES
from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Attention over split sequences: ring, zigzag, Ulysses and both

{verdict}

{claims}

{marks}

## Eight GPUs, Llama-3.1-8B's heads, 64K tokens

Iterations a second, and in brackets the share of the ideal: published, then ours.

{readme}

## Rings inside of Ulysses

Forward iterations a second on eight A100s, published and ours.

{degrees}

## What a rank sends

Elements of half precision, in parts of Nh, forward and backward.

{volumes}
"""
RINGS = ("ring", "zigzag")


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    readme, degrees, volumes = found["readme"], found["degrees"], found["volumes"]
    both = [row for row in readme if row["pass"] == "fwd+bwd"]
    long = [row for row in degrees if row["tokens"] > 100_000]
    short = [row for row in degrees if row["tokens"] <= 100_000]
    alone = [row for row in volumes if row["ulysses"] == 1]

    def faster(row: Mapping[str, Any], who: str, slow: str) -> float:
        return float(row[who]["zigzag"] / row[who][slow])

    def gains(rows: Sequence[Mapping[str, Any]]) -> list[Case]:
        return [Case(_degree(row), faster(row, "published", "basic"), faster(row, "ours", "basic")) for row in rows]

    own: Cases = {
        "recorded": [
            Case(f"{row['ring']} x {row['ulysses']}, {phase}", *pair)
            for row in volumes
            for phase, pair in zip(PASSES, zip(row["planned"], row["recorded"], strict=True), strict=True)
        ],
        "ulysses": [
            Case(f"{row['ulysses']} ranks, {phase}", 4 / p * (p - 1) / p, sent)
            for row in volumes
            if row["ring"] == 1
            for p in [row["ulysses"]]
            for phase, sent in zip(PASSES, row["recorded"], strict=True)
        ],
        "ring": [Case(f"{row['ring']} ranks", 4, sum(row["recorded"])) for row in alone],
        "share": [
            Case(
                f"{row['GPUs']}, {row['pass']}, {name}",
                *(row[who][name] / row[who]["ideal"] for who in ("published", "ours")),
            )
            for row in readme
            for name in RINGS
        ],
        "faster": [Case(row["GPUs"], faster(row, "published", "ring"), faster(row, "ours", "ring")) for row in both],
        "speed": [
            Case(f"{row['GPUs']}, {row['pass']}, {name}", row["published"][name], row["ours"][name])
            for row in readme
            for name in RINGS
        ],
        "degrees": gains(long),
        "short": gains(short),
        "nvlink": [
            Case(_degree(ring), exchange["ours"]["zigzag"], ring["ours"]["zigzag"])
            for exchange in degrees
            for ring in degrees
            if (exchange["ulysses"], ring["ulysses"]) == (8, 1) and exchange["tokens"] > 10_000
            if all(exchange[key] == ring[key] for key in ("tokens", "heads"))
        ],
        "heads": [
            Case(f"{row['ranks']} ranks, {name}", float(name != "Ulysses" or row["ranks"] <= 32), float(row[name]))
            for row in found["refused"]
            for name in ("Ulysses", "ring + Ulysses")
        ],
    }
    ideals = [row["ours"]["ideal"] / row["published"]["ideal"] for row in both]
    return read_claims(
        Path(__file__).parent,
        own,
        ring=sum(max(alone, key=lambda row: row["ring"])["recorded"]),
        zigzag=faster(both[0], "ours", "ring"),
        zigzag_a100=faster(both[1], "ours", "ring"),
        h800=ideals[0],
        a100=ideals[1],
    )


def _degree(row: Mapping[str, Any]) -> str:
    return f"{row['tokens'] // 1024}K, {row['heads']} heads, Ulysses {row['ulysses']}"


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    readme = [
        [
            row["GPUs"],
            row["pass"],
            *(
                f"{row[who][name]:.1f} ({row[who][name] / row[who]['ideal']:.0%})"
                for name in RINGS
                for who in ("published", "ours")
            ),
            *(
                f"{row['ours'][name]:.1f} ({row['ours'][name] / row['ours']['ideal']:.0%})"
                for name in ("Ulysses", "ring + Ulysses")
            ),
        ]
        for row in found["readme"]
    ]
    degrees = [
        [
            f"{row['tokens'] // 1024}K",
            f"{row['heads']} × {row['head_dim']}",
            str(row["ulysses"]),
            *(f"{row[who][name]:.1f}" for name in ("basic", "zigzag") for who in ("published", "ours")),
        ]
        for row in found["degrees"]
    ]
    volumes = [
        [str(row["ring"]), str(row["ulysses"]), *(f"{sent:.4f}" for sent in row["recorded"])]
        for row in found["volumes"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        readme=markdown(
            ["GPUs", "pass", "ring", "ours", "zigzag", "ours", "Ulysses, ours", "ring 2 × Ulysses 4, ours"], readme
        ),
        degrees=markdown(["tokens", "heads", "Ulysses", "basic", "ours", "zigzag", "ours"], degrees),
        volumes=markdown(["ring", "Ulysses", *PASSES], volumes),
    )
