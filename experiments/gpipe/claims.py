"""What GPipe claims, beside what was simulated; and the page that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.gpipe.simulated import FITTED, UNEVEN
from experiments.report import MARKS, NONE, Case, Claim, claims_table, markdown, verdict

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
    return [
        Claim(
            name="idle share (K − 1) / (M + K − 1)",
            claim="A share (K − 1) / (M + K − 1) of the time is idle",
            mark="P",
            cases=[
                Case(
                    f"K {one['K']}, M {one['M']}",
                    (one["K"] - 1) / (one["M"] + one["K"] - 1),
                    one["simulated"],
                )
                for one in found["bubbles"]
            ],
            tolerance=1e-6,
            because="Stages alike and messages for nothing, on 2 to 16 ranks with 1 to 64 micro-batches.",
        ),
        Claim(
            name="Transformer-48 at M = 32",
            claim="Table 2, Transformer-48, M = 32: 1.8, 3.4, 6.3 times the throughput of K = 2, M = 1",
            mark="P",
            cases=cases(rows, "T2", "Transformer-48", (32,)),
            tolerance=0.1,
            relative=True,
            because="Ours is always above: the clock has no messages and no work beside the stages.",
        ),
        Claim(
            name="its growth from K = 2 to 4 and 8",
            claim="Table 2, Transformer-48, M = 32: from K = 2 to 4 and 8",
            mark="D",
            cases=ratios,
            tolerance=0.05,
            relative=True,
            because="Two printed digits allow 1.81 to 1.97 and 3.38 to 3.63.",
        ),
        Claim(
            name="Transformer-24 over PCIe",
            claim="Table 3, Transformer-24 on P100s without fast links, M = 32: 1.8, 3.3 times K = 2",
            mark="P",
            cases=cases(rows, "T3", "Transformer-24", (32,)),
            tolerance=0.05,
            relative=True,
            because="Without any time for messages: what PCIe costs is within this.",
        ),
        Claim(
            name="AmoebaNet-D over PCIe",
            claim="Table 3, AmoebaNet-D, M = 32: 1.7, 2.7 times K = 2",
            mark="P",
            cases=cases(rows, "T3", UNEVEN, (32,), heavier),
            tolerance=0.12,
            relative=True,
            because="With the heaviest stage that table 2 implies; with equal stages it would be 1.89 and 3.38.",
        ),
        Claim(
            name="AmoebaNet-D at M = 4",
            claim="Table 2, AmoebaNet-D, M = 4: 1.07, 1.26, 1.72",
            mark="P",
            cases=cases(rows, "T2", UNEVEN, (4,), heavier),
            tolerance=0.1,
            relative=True,
            because="One heavy stage, fitted at M = 32, is not all: times of the layers were not published.",
            expected=False,
        ),
        Claim(
            name="Transformer-48 at M = 4",
            claim="Table 2, Transformer-48, M = 4: 1.7, 3.2, 4.8",
            mark="P",
            cases=cases(rows, "T2", "Transformer-48", (4,)),
            tolerance=0.1,
            relative=True,
            because="""Four micro-batches cannot be at more than four places at once, and 4.8 is more than 4: time per sample was \
not the same for all M (batch sizes were fitted to the memory).""",
            expected=False,
        ),
        Claim(
            name="all models at M = 1",
            claim="Table 2, M = 1: 1.07 and 1.30 (Transformer-48), 1.13 and 1.38 (AmoebaNet-D)",
            mark="P",
            cases=[*cases(rows, "T2", "Transformer-48", (1,)), *cases(rows, "T2", UNEVEN, (1,))],
            tolerance=0.05,
            relative=True,
            because="One micro-batch is at one place at a time, so more ranks cannot help: it is larger batches in more memory.",
            expected=False,
        ),
    ]


def named(row: Row, table: str, model: str, m: int) -> bool:
    """Whether a row is that of a table, a model and a number of micro-batches."""
    return bool((row["table"], row["model"], row["M"]) == (table, model, m))


def cases(
    rows: Sequence[Row], table: str, model: str, counts: Iterable[int], ours: str = "equal stages"
) -> list[Case]:
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
        for row in sorted(
            found["throughput"], key=lambda row: (row["table"], row["model"], row["M"], row["K"])
        )
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
