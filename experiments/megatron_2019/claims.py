"""Claims of Megatron-LM in 2019, beside what was simulated; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.megatron_2019.simulated import setting
from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Megatron-LM in 2019: weak scaling

{verdict}

{claims}

{marks}

## Weak scaling

V100s, {devices} a node, half precision, {rows} sequences of {sequence} tokens a group, all layers recomputed. Per cent of the
TFLOP/s of one GPU. *Apart*: gradients are summed after the backward; *beside*: beside it.

{table}
"""
BASELINE, PETAFLOPS = 39.0, 15.1
"""TFLOP/s of one GPU, and PFLOP/s of all 512."""


def shares(found: Mapping[str, Any], key: str) -> list[float]:
    """Per cent of one GPU's speed, by row."""
    rows = found["rows"]
    return [100 * row[key] / rows[0]["ours, tensor"] for row in rows]


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    rows = found["rows"]
    names = [f"{row['billions']:g}B on {row['tensor']:g}" for row in rows]
    tensor, data, beside = (shares(found, f"ours, {key}") for key in ("tensor", "data", "beside"))
    own: Cases = {
        "parameters": [Case(n, row["billions"], row["ours, billions"]) for n, row in zip(names, rows, strict=True)],
        "tensor": [Case(n, row["tensor_percent"], share) for n, row, share in zip(names, rows, tensor, strict=True)],
        "data": [Case(n, row["data_percent"], share) for n, row, share in zip(names[:3], rows, data, strict=False)],
        "data_on_512": [Case(names[3], rows[3]["data_percent"], data[3])],
        "beside_on_512": [Case(names[3], rows[3]["data_percent"], beside[3])],
        "falls": [
            Case(f"{what}, {n}", before, after)
            for what, line in (("tensor", tensor), ("data", data))
            for n, (before, after) in zip(names[1:], pairwise(line), strict=True)
        ],
        "baseline": [Case("1 GPU", BASELINE, rows[0]["ours, tensor"])],
        "all": [Case("512 GPUs", PETAFLOPS, rows[3]["ours, data"] * rows[3]["gpus_with_data"] / 1e3)],
    }
    return read_claims(Path(__file__).parent, own)


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    table = [
        [
            f"{row['billions']:g}",
            f"{row['tensor']:g}",
            f"{row['tensor_percent']:g}",
            f"{tensor:.1f}",
            f"{row['gpus_with_data']:g}",
            f"{row['data_percent']:g}",
            f"{data:.1f}",
            f"{beside:.1f}",
            f"{row['ours, tensor']:.1f}",
            f"{row['gradients']:.2f}",
        ]
        for row, tensor, data, beside in zip(
            found["rows"], *(shares(found, f"ours, {key}") for key in ("tensor", "data", "beside")), strict=True
        )
    ]
    head = [
        "billion",
        "GPUs",
        "%",
        "ours",
        "with data",
        "%",
        "ours, apart",
        "beside",
        "TFLOP/s, tensor",
        "gradients, s",
    ]
    return PAGE.format(
        verdict=verdict(made), claims=claims_table(made), marks=MARKS, **vars(setting()), table=markdown(head, table)
    )
