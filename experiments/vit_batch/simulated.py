"""The largest batch of a vision transformer over 64 ranks, and how fast it trains, under 1D, 2D and 2.5D."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.tensor_layers import Grid, Layers, hold, largest_batch, memory, seconds, trace
from experiments.toml_tables import read_tables
from meshfold.planner import find_machine

FOLDER = Path(__file__).resolve().parent
GRIDS = {
    "1d": Grid(mode="1d", sizes=(64,)),
    "2d": Grid(mode="2d", sizes=(8, 8)),
    "2.5d": Grid(mode="2.5d", sizes=(4, 4, 4)),
}
STATES = 8.0  # bytes of parameters, gradients, float32 masters and two moments, in those of a half-precision parameter


@dataclass(frozen=True, kw_only=True)
class Setting(Layers):
    """The table of settings.toml; memory of a device in GB."""

    machine: str
    memory: float


def setting() -> Setting:
    """The only one."""
    return read_tables(FOLDER / "settings.toml", Setting)["vit"]


def everything() -> dict[str, Any]:
    """All numbers."""
    return {"rows": [row_of(scheme, recompute=again) for again in (True, False) for scheme in GRIDS]}


def row_of(scheme: str, *, recompute: bool, batch: int = 0) -> dict[str, Any]:
    """A scheme at a batch; 0: the largest that fits."""
    one, grid = setting(), GRIDS[scheme]
    size = replace(one.size, batch=batch or 1)
    if not batch:
        most = largest_batch(grid, size, one.layers, 1e9 * one.memory, state_bytes=STATES, recompute=recompute)
        size = replace(size, batch=most)
    held = memory(hold(grid, size), one.layers, state_bytes=STATES, recompute=recompute)
    found, machine = trace(grid, size), find_machine(one.machine)
    speeds = {
        charge: size.batch
        / (one.layers * seconds(found, grid, size, machine, trees=charge == "trees").training(recompute=recompute))
        for charge in ("trees", "rings")
    }
    return {
        "scheme": scheme,
        "recomputed": recompute,
        "batch": size.batch,
        "images": speeds,
        "memory": {"states": held.states, "kept": held.inputs, "layer": held.layer},
    }
