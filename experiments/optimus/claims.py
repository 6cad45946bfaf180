"""Claims of Optimus, beside what was simulated; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.optimus.simulated import LAYERS, MACHINE, PRECISION, SCHEMES, SEQUENCE
from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, read_csv, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Optimus: 2D beside 1D, published and on the clock

{verdict}

{claims}

{marks}

## Weak scaling

`{machine}`, {precision}, {layers} layers, sequences of {sequence} tokens, every layer recomputed, the largest batch that fits.
*2d*: rings, as our code sends; *2d, trees*: broadcasts along trees, as the paper counts. Seconds of operators and collectives: for
one sequence.

{weak}

GB of a rank at that batch.

{memory}
"""
Rows = Mapping[tuple[str, int], Mapping[str, Any]]
LARGEST, INFERENCE, BATCHES = 64, 1.78, {"1d": 60, "2d": 480}
"""GPUs of the headline, its factor in inference (abstract), and the largest batches there (account of the paper)."""


def rows_by(found: Mapping[str, Any]) -> Rows:
    """Rows by scheme and GPUs."""
    return {(row["scheme"], row["GPUs"]): row for row in found["rows"]}


def published() -> dict[str, dict[int, float]]:
    """Sequences a second by scheme and GPUs."""
    rows = read_csv(Path(__file__).parent / "published_weak.csv")
    return {scheme: {int(row["gpus"]): float(row[scheme]) for row in rows} for scheme in ("1d", "2d")}


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    ours, theirs = rows_by(found), published()
    sizes = sorted(theirs["1d"])

    def speed(scheme: str, gpus: int) -> Case:
        return Case(f"{gpus} GPUs", theirs[scheme[:2]][gpus], ours[scheme, gpus]["training"])

    def quotient(scheme: str, gpus: int, key: str = "training") -> float:
        return float(ours[scheme, gpus][key] / ours["1d", gpus][key])

    def quotients(scheme: str, chosen: Sequence[int]) -> list[Case]:
        return [Case(f"{n} GPUs", theirs["2d"][n] / theirs["1d"][n], quotient(scheme, n)) for n in chosen]

    batches = {scheme: [ours[scheme, n]["batch"] for n in sizes] for scheme in BATCHES}
    own: Cases = {
        "one_d": [speed("1d", n) for n in sizes],
        "two_d": [speed("2d, trees", n) for n in (4, 16, 64)],
        "two_d_on_36": [speed("2d, trees", 36)],
        "loss_on_4": quotients("2d, trees", [4]),
        "even_on_16": quotients("2d, trees", [16]),
        "gain_on_64": quotients("2d, trees", [64]),
        "between": [  # trees below, rings above; so many of both that are on the wrong side
            Case(f"{n} GPUs, {which}", 0, float((quotient(scheme, n) > theirs["2d"][n] / theirs["1d"][n]) != above))
            for n in (4, 64)
            for which, scheme, above in (("trees", "2d, trees", False), ("rings", "2d", True))
        ],
        "rings_on_4": quotients("2d", [4]),
        "inference": [Case("quotient", INFERENCE, quotient("2d, trees", LARGEST, "inference"))],
        "batch_1d": [Case("sequences", BATCHES["1d"], ours["1d", LARGEST]["batch"])],
        "batch_2d": [Case("sequences", BATCHES["2d"], ours["2d", LARGEST]["batch"])],
        "batch_quotient": [Case("quotient", BATCHES["2d"] / BATCHES["1d"], quotient("2d", LARGEST, "batch"))],
        "batch_grows": [
            *(
                Case(f"2d from {n}", after, before)
                for n, (before, after) in zip(sizes, pairwise(batches["2d"]), strict=False)
            ),
            *(
                Case(f"1d from {n}", before, after)
                for n, (before, after) in zip(sizes, pairwise(batches["1d"]), strict=False)
            ),
        ],
        "strong": (),
    }
    numbers = dict(rings=quotient("2d", LARGEST), forward=quotient("2d", LARGEST, "inference"))
    return read_claims(Path(__file__).parent, own, **numbers)


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    theirs = published()
    weak = [
        [
            str(row["GPUs"]),
            row["scheme"],
            str(row["hidden"]),
            str(row["batch"]),
            f"{theirs[row['scheme'][:2]][row['GPUs']]:.2f}",
            f"{row['training']:.2f}",
            f"{row['inference']:.2f}",
            f"{row['operators']:.3f}",
            f"{row['collectives']:.3f}",
            f"{row['sent'] / 1e9:.2f}",
        ]
        for row in found["rows"]
    ]
    held = [
        [str(row["GPUs"]), row["scheme"], *(f"{row['memory'][key] / 1e9:.1f}" for key in ("states", "inputs", "layer"))]
        for row in found["rows"]
        if row["scheme"] != SCHEMES[-1]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        machine=MACHINE,
        precision=PRECISION,
        layers=LAYERS,
        sequence=SEQUENCE,
        weak=markdown(
            [
                "GPUs",
                "scheme",
                "channels",
                "batch",
                "sequences/s",
                "ours",
                "inference, ours",
                "operators, s",
                "collectives, s",
                "GB sent a sequence",
            ],
            weak,
        ),
        memory=markdown(["GPUs", "scheme", "parameters and gradients", "kept inputs", "one layer"], held),
    )
