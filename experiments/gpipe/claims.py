"""What GPipe claims, beside what was simulated; and the page that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.gpipe.simulated import FITTED, UNEVEN
from experiments.report import MARKS, NONE, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

Row = Mapping[str, Any]
PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# GPipe: throughput and idle time, published and simulated

{verdict}

{claims}

{marks}

## Throughput

K accelerators, M micro-batches. *Equal*: all stages alike. *Heavier*: one stage takes so much more than a mean one that
M = {fitted} of table 2 comes out: {heaviest} mean stages at K = 2, 4, 8. Messages take no time, a micro-batch takes 1 / M of its
batch's time, and 1 is the time of a batch without parallelism (table 2), or K = 2 (table 3).

{throughput}

## Idle time

Simulated, F + B + W alike on all stages, which is (K − 1) / (M + K − 1). Bold: M ≥ 4 K, where the paper calls it negligible.

{bubbles}
"""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    rows: list[Row] = found["throughput"]
    deep = {row["K"]: row for row in rows if named(row, "T2", "Transformer-48", FITTED)}
    ratios = [
        Case(
            f"K = {k} against K = 2",
            deep[k]["published"] / deep[2]["published"],
            deep[k]["equal stages"] / deep[2]["equal stages"],
        )
        for k in (4, 8)
    ]
    heavier = "a heavier stage"
    own: Cases = {
        "idle_share": [
            Case(
                f"K {one['K']}, M {one['M']}",
                (one["K"] - 1) / (one["M"] + one["K"] - 1),
                one["simulated"],
            )
            for one in found["bubbles"]
        ],
        "transformer_48_at_m_32": cases(rows, "T2", "Transformer-48", (32,)),
        "transformer_48_growth": ratios,
        "transformer_24_over_pcie": cases(rows, "T3", "Transformer-24", (32,)),
        "amoebanet_d_over_pcie": cases(rows, "T3", UNEVEN, (32,), heavier),
        "amoebanet_d_at_m_4": cases(rows, "T2", UNEVEN, (4,), heavier),
        "transformer_48_at_m_4": cases(rows, "T2", "Transformer-48", (4,)),
        "all_models_at_m_1": [*cases(rows, "T2", "Transformer-48", (1,)), *cases(rows, "T2", UNEVEN, (1,))],
    }
    return read_claims(Path(__file__).parent, own)


def named(row: Row, table: str, model: str, m: int) -> bool:
    """Whether a row is that of a table, a model and a number of micro-batches."""
    return bool((row["table"], row["model"], row["M"]) == (table, model, m))


def cases(rows: Sequence[Row], table: str, model: str, counts: Iterable[int], ours: str = "equal stages") -> list[Case]:
    """Rows of a published table, without the one that is 1 by definition."""
    return [
        Case(f"{model} K {row['K']}, M {row['M']}", row["published"], row[ours])
        for row in rows
        if row["M"] in counts
        and (row["table"], row["model"]) == (table, model)
        and (row["K"], row["M"]) != (2, 1 if table == "T2" else 32)
    ]


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    rows = [
        [
            {"T2": "2, TPUv2", "T3": "3, P100 over PCIe"}[row["table"]],
            row["model"],
            str(row["M"]),
            str(row["K"]),
            f"{row['published']:.2f}",
            f"{row['equal stages']:.2f}",
            f"{row['a heavier stage']:.2f}" if "a heavier stage" in row else NONE,
        ]
        for row in sorted(found["throughput"], key=lambda row: (row["table"], row["model"], row["M"], row["K"]))
    ]
    counts = sorted({one["M"] for one in found["bubbles"]})
    idle = {(one["K"], one["M"]): one["simulated"] for one in found["bubbles"]}
    bubbles = [
        [str(k), *((f"**{idle[k, m]:.1%}**" if m >= 4 * k else f"{idle[k, m]:.1%}") for m in counts)]
        for k in sorted({k for k, _ in idle})
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        fitted=FITTED,
        heaviest=", ".join(f"{x:.2f}" for x in found["heaviest"].values()),
        throughput=markdown(["table", "model", "M", "K", "published", "equal", "heavier"], rows),
        bubbles=markdown(["K", *(f"M = {m}" for m in counts)], bubbles),
    )
