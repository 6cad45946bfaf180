"""Claims of Colossal-AI's chart, beside what was simulated; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, read_csv, verdict
from experiments.vit_batch.simulated import setting

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# A vision transformer over 64 GPUs: largest batch and speed

{verdict}

{claims}

{marks}

## Batches

`{machine}` with {memory:g} GB, {precision}, {layers} layers of {hidden} channels, {sequence} tokens an image, Adam with float32
masters; the largest batch that fits. Images a second by trees (broadcasts whose levels wait for each other) and by rings.

{rows}

The chart's throughput has no unit.

{chart}
"""


def published() -> dict[str, dict[str, float]]:
    """Batch and throughput by scheme."""
    rows = read_csv(Path(__file__).parent / "published.csv")
    return {row["scheme"]: {key: float(row[key]) for key in ("batch", "throughput")} for row in rows}


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    said = published()
    by = {(row["scheme"], row["recomputed"]): row for row in found["rows"]}

    def batches(scheme: str, *, again: bool) -> float:
        return float(by[scheme, again]["batch"] / by["1d", again]["batch"])

    def speed(scheme: str, charge: str) -> float:
        return float(by[scheme, True]["images"][charge] / by["1d", True]["images"]["rings"])

    faster = {scheme: said[scheme]["throughput"] / said["1d"]["throughput"] for scheme in ("2d", "2.5d")}
    larger = {scheme: said[scheme]["batch"] / said["1d"]["batch"] for scheme in ("2d", "2.5d")}
    own: Cases = {
        "batch_1d": [Case("1d", said["1d"]["batch"], by["1d", True]["batch"])],
        "batch_grids": [Case(scheme, said[scheme]["batch"], by[scheme, True]["batch"]) for scheme in larger],
        "larger": [Case(scheme, factor, batches(scheme, again=False)) for scheme, factor in larger.items()],
        "larger_recomputed": [Case(scheme, factor, batches(scheme, again=True)) for scheme, factor in larger.items()],
        "between": [
            Case(f"2d, {charge}", 0, float((speed("2d", charge) > faster["2d"]) != above))
            for charge, above in (("trees", False), ("rings", True))
        ],
        "depth": [Case("2.5d in 2d", faster["2.5d"] / faster["2d"], speed("2.5d", "trees") / speed("2d", "trees"))],
        "speed_of_depth": [Case("2.5d, trees", faster["2.5d"], speed("2.5d", "trees"))],
        "megatron": [Case("1d in Megatron-LM", said["1d"]["throughput"] / said["Megatron-LM"]["throughput"], 1.0)],
    }
    return read_claims(Path(__file__).parent, own)


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    rows = [
        [
            row["scheme"],
            "every layer" if row["recomputed"] else "nothing",
            str(row["batch"]),
            *(f"{row['images'][charge]:.0f}" for charge in ("trees", "rings")),
            *(f"{row['memory'][key] / 1e9:.1f}" for key in ("states", "kept", "layer")),
        ]
        for row in found["rows"]
    ]
    head = ["scheme", "recomputed", "batch", "images/s, trees", "rings", "states, GB", "kept, GB", "one layer, GB"]
    chart = [[scheme, f"{row['batch']:g}", f"{row['throughput']:g}"] for scheme, row in published().items()]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        **vars(setting()),
        rows=markdown(head, rows),
        chart=markdown(["scheme", "batch", "throughput"], chart),
    )
