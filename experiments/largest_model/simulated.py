"""The table's rows by plans, and the largest model of each placement on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.planned import GB, Node, Size, planned
from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.planner import Machine

FOLDER = Path(__file__).resolve().parent
PLACEMENTS = {"zero3-offload": "cpu", "gemini-auto": "auto", "zero3": "cuda", "gemini": "cuda"}
"""Our placement of each strategy: ZeRO's stage 3 and Gemini on the device are one here."""
TRIED = {"cpu": ("24B", "28B", "32B"), "auto": ("28B", "32B", "36B")}
"""Models around the largest, by placement."""


def everything() -> dict[str, Any]:
    """All numbers."""
    machine, sizes = node(), zoo()
    rows = [
        {
            "strategy": row["strategy"],
            "gpus": int(row["gpus"]),
            "model": row["model"],
            "published": {"GB": float(row["MB"]) * 2**20 / GB, "seconds": float(row["seconds"])},
            "ours": plan(sizes[row["model"]], PLACEMENTS[row["strategy"]], int(row["gpus"]), machine),
        }
        for row in read_csv(FOLDER / "published.csv")
    ]
    tried = [
        {"placement": placement, "model": name, **plan(sizes[name], placement, 1, machine)}
        for placement, names in TRIED.items()
        for name in names
    ]
    return {"rows": rows, "tried": tried}


def node() -> Machine:
    """The table's machine."""
    return read_tables(FOLDER / "settings.toml", Node)["node"].machine()


def zoo() -> dict[str, Size]:
    """Return the benchmark's models by name."""
    return {row["name"]: Size.of(row) for row in read_csv(FOLDER / "sizes.csv")}


def plan(size: Size, placement: str, gpus: int, machine: Machine) -> dict[str, Any]:
    """Return the plan of a step with one sequence a GPU."""
    spec: dict[str, object] = dict(data=gpus, zero=dict(stage=3, placement=placement))
    return planned(size, spec, machine, batch=gpus)
