"""The table of GPT2-XL by plans, and the largest batch of each strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.planned import GB, Node, Size, planned
from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.planner import Machine

FOLDER = Path(__file__).resolve().parent
XL = Size(layers=48, hidden=1600, heads=25)
SHARDED: dict[str, object] = dict(data=4, zero=dict(stage=3, placement="cuda"))
SPECS: dict[str, dict[str, object]] = {"ddp": dict(data=4), "zero3": SHARDED, "gemini": SHARDED}
"""Our spec of each strategy: ZeRO's stage 3 and Gemini on the device are one here."""


def everything() -> dict[str, Any]:
    """All numbers."""
    machine, plans = node(), dict[str, dict[str, Any]]()
    rows = []
    for row in read_csv(FOLDER / "published.csv"):
        spec, batch = SPECS[row["strategy"]], int(row["batch"])
        same = f"{spec} {batch}"  # two strategies are one spec
        plans[same] = plans.get(same) or both(spec, machine, batch)
        published = {"samples/s": float(row["samples/s"]), "GB": float(row["MB"]) * 2**20 / GB}
        rows.append({"strategy": row["strategy"], "batch": batch, "published": published, **plans[same]})
    return {
        "rows": rows,
        "largest": {name: largest(name, machine) for name in ("ddp", "zero3")},
        "limit": machine.memory / GB,
    }


def both(spec: Mapping[str, object], machine: Machine, batch: int, size: Size = XL) -> dict[str, Any]:
    """Return the plans with our loss, and with whole logits."""
    return {
        "ours": planned(size, spec, machine, batch=batch),
        "whole logits": planned(size, spec, machine, batch=batch, kernels="off"),
    }


def node() -> Machine:
    """The table's machine."""
    return read_tables(FOLDER / "settings.toml", Node)["node"].machine()


def largest(strategy: str, machine: Machine, size: Size = XL) -> int:
    """Return the most sequences a GPU that fit: on the line through two plans, one more in each turn, proved at its end.

    Raises:
        RuntimeError: if memory does not grow with the batch.
    """

    def plan(rows: int) -> dict[str, Any]:
        return planned(size, SPECS[strategy], machine, batch=4 * rows)

    few, more = 32, 64
    line = [plan(rows)["GB"] for rows in (few, more)]
    for _ in range(8):
        each = (line[1] - line[0]) / (more - few)
        found = int(few + (machine.memory / GB - line[0]) / each) if each > 0 else few
        here = plan(found)
        if here["fits"] and not plan(found + 1)["fits"]:
            return found
        more, line[1] = (found, here["GB"]) if found != more else (found + 1, plan(found + 1)["GB"])
    raise RuntimeError(f"memory of {strategy} does not grow with the batch as a line: it ends near {more} sequences")
