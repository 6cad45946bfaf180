"""GPT2-medium under budgets of memory, with the recomputation that the planner chooses."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.planned import GB, Size, planned
from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.engine.zero import USUAL_CONTEXT_BYTES, DeviceLimit
from meshfold.planner import Machine, find_machine

FOLDER = Path(__file__).resolve().parent
HOST = 4 * GB  # so that nothing is placed there
STEP = 4  # sequences by which the batch is sought


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The table of settings.toml: a preset, that of results/measured.json, a GPT's sizes, and budgets in GB, the largest first."""

    preset: str
    measured_on: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    budgets: str
    source: str

    @property
    def size(self) -> Size:
        """The model."""
        return Size(layers=self.layers, hidden=self.hidden, heads=self.heads)

    def machine(self) -> Machine:
        """Return its GPU, with a host that has room for the process alone: the chart is about recomputation."""
        preset = find_machine(self.preset)
        return replace(preset, host=replace(preset.host, memory=HOST, disk=0.0))


def everything() -> dict[str, Any]:
    """All numbers."""
    one = setting()
    budgets = [float(budget) for budget in one.budgets.split()]
    batch = largest(one, budgets[0])
    return {
        "batch": batch,
        "whole": plan(one, batch, None),
        "blocks": plan(one, batch, None, "blocks"),
        "budgets": [{"budget": budget, **plan(one, batch, budget)} for budget in budgets],
        "measured": ran(one),
        "published": [
            {key: float(value) for key, value in row.items()} for row in read_csv(FOLDER / "published_budgets.csv")
        ],
    }


def ran(one: Setting) -> list[dict[str, Any]]:
    """Return what ``--measure 1`` found, each budget beside the plan for the GPU that it ran on."""
    found = json.loads((FOLDER / "results" / "measured.json").read_text(encoding="utf-8"))
    there = replace(one, preset=one.measured_on)
    keys = ("budget", "GB", "seconds")
    return [
        {**{key: row[key] for key in keys}, "planned": plan(there, found["batch"], row["budget"])}
        for row in found["rows"]
    ]


def setting() -> Setting:
    """Return what settings.toml says."""
    return read_tables(FOLDER / "settings.toml", Setting)["gpt2-medium"]


def plan(one: Setting, batch: int, budget: float | None, recompute: str | None = "auto") -> dict[str, Any]:
    """Return GB and seconds of a step: within a budget in GB, or with ``recompute`` as it is; nothing is recomputed by default."""
    zero: dict[str, object] = dict(stage=3, placement="auto")
    if budget is not None:
        zero["gpu_memory_limit"] = int(budget * GB)
    elif recompute == "auto":
        recompute = None
    made = planned(
        one.size,
        dict(data=1, zero=zero),
        one.machine(),
        batch=batch,
        sequence=one.sequence,
        recompute=recompute,
    )
    return {key: made[key] for key in ("GB", "seconds", "fits")}


def largest(one: Setting, budget: float) -> int:
    """Return the most sequences, in steps of four, that a budget holds with nothing recomputed."""
    few, more = (plan(one, batch, None)["GB"] for batch in (STEP, 2 * STEP))
    room = DeviceLimit(bytes=int(budget * GB), outside=USUAL_CONTEXT_BYTES).plan_bytes / GB
    found = STEP * int((room - 2 * few + more) / (more - few))
    while plan(one, found, None)["GB"] > room:
        found -= STEP
    return found
