"""1D, 2D and 2.5D on 64 GPUs over batches, on two machines; and gradients of 2.5D on CPU ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.tensor_layers import Grid, Layers
from experiments.tensor_parity import parity
from experiments.tensor_sweep import sweep
from experiments.toml_tables import read_tables
from meshfold.planner import find_machine

FOLDER = Path(__file__).resolve().parent
BATCHES = (16, 32, 64, 128, 256, 512, 1024)
GRIDS = {
    "1d": Grid(mode="1d", sizes=(64,)),
    "2d, trees": Grid(mode="2d", sizes=(8, 8)),
    "2.5d, trees": Grid(mode="2.5d", sizes=(4, 4, 4)),
    "2d": Grid(mode="2d", sizes=(8, 8)),
    "2.5d": Grid(mode="2.5d", sizes=(4, 4, 4)),
}
"""Without ``trees``: by rings, as our code sends."""
RUN = (Grid(mode="2.5d", sizes=(1, 2, 2)), Grid(mode="2.5d", sizes=(2, 2, 2)))
"""Run with values, on CPU ranks."""


@dataclass(frozen=True, kw_only=True)
class Setting(Layers):
    """A table of settings.toml: a machine and a stack of layers."""

    machine: str


def settings() -> dict[str, Setting]:
    """By name."""
    return read_tables(FOLDER / "settings.toml", Setting)


def everything() -> dict[str, Any]:
    """All numbers; runs with values start eight CPU ranks."""
    return {
        "sweeps": {name: swept(one, BATCHES) for name, one in settings().items()},
        "runs": [parity(grid) for grid in RUN],
    }


def swept(one: Setting, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """Milliseconds a sequence by batch and grid."""
    return sweep(GRIDS, one.size, batches, find_machine(one.machine), one.layers)
