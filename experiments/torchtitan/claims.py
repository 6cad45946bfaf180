"""Claims of torchtitan's benchmarks, beside plans; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, NONE, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# torchtitan on 8 to 256 H100s, published and planned

{verdict}

{claims}

{marks}

## Tokens a second of a GPU

*At most*: with no traffic of tensor parallelism that the layers wait for.

{rows}
"""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    rows = [row for row in found["rows"] if "ours" in row]
    by = {(row["model"], row["gpus"], row["technique"]): row for row in rows}
    fsdp = [row for row in rows if row["tensor"] == 1]
    shared = [row for row in rows if row["tensor"] > 1 and row["technique"] == "compile"]

    def left(row: Mapping[str, Any]) -> float:
        return float(row["ours"]["most"] / row["ours"]["TPS"])

    def times(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
        return one["published"] / other["published"], one["ours"]["TPS"] / other["ours"]["TPS"]

    own: Cases = {
        "tensor": [Case(f"{row['model']} on {row['gpus']}", row["published"], row["ours"]["TPS"]) for row in shared],
        "async": [
            Case(row["model"], left(row), by[row["model"], row["gpus"], "async"]["published"] / row["published"])
            for row in shared
        ],
        "weak": [Case(how, *times(by["8B", 128, how], by["8B", 8, how])) for how in ("eager", "compile")],
        "fsdp": [Case(f"{row['gpus']}, {row['technique']}", row["published"], row["ours"]["TPS"]) for row in fsdp],
        "compile": [Case(f"{n} GPUs", *times(by["8B", n, "compile"], by["8B", n, "eager"])) for n in (8, 128)],
        "float8": (),
    }
    gains = {row["model"]: left(row) for row in shared}
    above = [100 * (case.ours / case.published - 1) for case in own["fsdp"]]
    said = dict(seventy=gains["70B"], eight=gains["8B"], compiled=own["compile"][0].ours)
    return read_claims(Path(__file__).parent, own, **said, least=min(above), furthest=max(above))


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    rows = [
        [
            row["row"],
            row["model"],
            str(row["gpus"]),
            f"{row['data']} × {row['tensor']} × {row['context']}",
            str(row["sequence"]),
            f"{row['technique']}, {row['kind']}",
            f"{row['published']:.0f}",
            *(
                [f"{row['ours']['TPS']:.0f}", f"{row['ours']['most']:.0f}", f"{row['ours']['GiB']:.1f}"]
                if "ours" in row
                else [NONE, NONE, NONE]
            ),
        ]
        for row in found["rows"]
    ]
    head = ["table", "model", "GPUs", "FSDP × TP × CP", "tokens", "how", "published", "ours", "at most", "GiB, ours"]
    return PAGE.format(verdict=verdict(made), claims=claims_table(made), marks=MARKS, rows=markdown(head, rows))
