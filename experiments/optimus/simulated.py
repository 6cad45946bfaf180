"""Weak scaling of 1D and 2D on the clock: the largest batch that fits, and how fast it trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.tensor_layers import Grid, Size, hold, largest_batch, memory, seconds, trace
from experiments.toml_tables import read_tables
from meshfold.planner import find_machine

FOLDER = Path(__file__).resolve().parent
MACHINE, PRECISION, LAYERS, SEQUENCE = "rtx5000x4", "fp32", 24, 512
SCHEMES = ("1d", "2d", "2d, trees")
"""Rings for all collectives; the last: 2D's gathers and scatters as broadcasts and reductions along trees."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A table of settings.toml.

    Attributes:
        gpus: all of them.
        side: of the square grid of 2D.
        hidden, heads: of the model.
    """

    gpus: int
    side: int
    hidden: int
    heads: int


def everything() -> dict[str, Any]:
    """All numbers."""
    return {"rows": [row for one in settings() for row in rows_of(one)]}


def settings() -> list[Setting]:
    """The sizes, from 4 to 64 GPUs."""
    return list(read_tables(FOLDER / "settings.toml", Setting).values())


def grid_of(scheme: str, one: Setting) -> Grid:
    """The ranks of a scheme: a line or a square."""
    return Grid(mode="1d", sizes=(one.gpus,)) if scheme == "1d" else Grid(mode="2d", sizes=(one.side, one.side))


def rows_of(one: Setting) -> list[dict[str, Any]]:
    """Every scheme on a number of GPUs."""
    return [row_of(scheme, one) for scheme in SCHEMES]


def row_of(scheme: str, one: Setting, batch: int = 0) -> dict[str, Any]:
    """A scheme on a number of GPUs, at a batch; 0: the largest that fits."""
    machine, grid = find_machine(MACHINE), grid_of(scheme, one)
    size = Size(hidden=one.hidden, heads=one.heads, sequence=SEQUENCE, batch=batch or 1, precision=PRECISION)
    spread = (
        one.gpus if scheme == "1d" else 1
    )  # Megatron spreads the kept inputs of layers over the ranks, as the paper ran it
    if not batch:
        size = replace(size, batch=largest_batch(grid, size, LAYERS, machine.memory, spread=spread))
    traced = trace(grid, size)
    held = memory(hold(grid, size), LAYERS, spread=spread)
    times = seconds(traced, grid, size, machine, trees=scheme == "2d, trees")
    step = LAYERS * times.training(recompute=True)
    return {
        "scheme": scheme,
        "GPUs": one.gpus,
        "hidden": one.hidden,
        "batch": size.batch,
        "training": size.batch / step,
        "inference": size.batch / (LAYERS * times.inference),
        "operators": LAYERS * (2 * times.forward + times.backward) / size.batch,
        "collectives": LAYERS * (2 * times.forward_sent + times.backward_sent) / size.batch,
        "sent": LAYERS * (2 * traced.moved("forward") + traced.moved("backward")) / size.batch,
        "memory": {"states": held.states, "inputs": held.inputs, "layer": held.layer},
    }
