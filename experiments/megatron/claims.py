"""Claims of SC'21, beside what was simulated; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.megatron.simulated import MACHINE
from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Megatron-LM on thousands of GPUs, published and on the clock

{verdict}

{claims}

{marks}

## Table 1

`{machine}`, half precision, micro-batches of one sequence of 2048 tokens, all layers recomputed. *v*: chunks of a rank's layers in
the interleaved schedule.

{first}

## Table 2

{second}
"""
Row = Mapping[str, Any]


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    first, second = found["table 1"], found["table 2"]
    pipelined = [row for row in second if row["scheme"] == "PTD"]
    sharded = [row for row in second if row["scheme"] != "PTD"]
    own: Cases = {
        "parameters": [
            Case(f"{row['params_B']:g}B", row["params_B"], row["ours, parameters"])
            for row in first
            if row["params_B"] > 5
        ],
        "table_1": [Case(f"{row['params_B']:g}B", row["seconds"], row["ours, seconds"]) for row in first],
        "larger_is_faster": [
            Case(
                "quotient",
                first[-1]["tflops"] / first[0]["tflops"],
                first[-1]["ours, TFLOP/s"] / first[0]["ours, TFLOP/s"],
            )
        ],
        "pipelined": [Case(_where(row), row["tflops"], row["ours, TFLOP/s"]) for row in pipelined],
        "sharded": [Case(_where(row), row["tflops"], row["ours, TFLOP/s"]) for row in sharded],
        "twice_the_gpus": [
            Case(f"{row['params_B']:g}B on {row['gpus']:g} GPUs", *(row[key] / other[key] for key in keys))
            for row in pipelined
            for other in sharded
            if (row["params_B"], row["gpus"]) == (other["params_B"], other["gpus"]) and row["gpus"] in (768, 1120)
            for keys in [("tflops", "ours, TFLOP/s")]
        ],
        "days": [Case(_where(row), row["days_300B_tokens"], row["ours, days"]) for row in pipelined],
    }
    return read_claims(Path(__file__).parent, own)


def _where(row: Row) -> str:
    return f"{row['scheme']}, {row['params_B']:g}B on {row['gpus']:g} GPUs"


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    first = [
        [
            f"{row['params_B']:g}",
            f"{row['gpus']:g}",
            f"{row['tensor']:g} × {row['pipeline']:g}",
            str(row["chunks"]),
            f"{row['seconds']:.2f}",
            f"{row['ours, seconds']:.2f}",
            f"{row['ours, seconds'] / row['seconds'] - 1:+.1%}",
            f"{row['tflops']:.0f}",
            f"{row['ours, TFLOP/s']:.0f}",
            f"{row['parts']['gradients']:.2f}",
            f"{row['parts']['optimizer']:.2f}",
        ]
        for row in found["table 1"]
    ]
    second = [
        [
            row["scheme"],
            f"{row['params_B']:g}",
            f"{row['gpus']:g}",
            f"{row['rows']:g}",
            f"{row['tflops']:.0f}",
            f"{row['ours, TFLOP/s']:.0f}",
            f"{row['days_300B_tokens']:.0f}",
            f"{row['ours, days']:.0f}",
        ]
        for row in found["table 2"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        machine=MACHINE,
        first=markdown(
            ["billion", "GPUs", "t × p", "v", "s", "ours", "off", "TFLOP/s", "ours", "gradients, s", "optimizer, s"],
            first,
        ),
        second=markdown(["scheme", "billion", "GPUs", "sequences", "TFLOP/s", "ours", "days", "ours"], second),
    )
