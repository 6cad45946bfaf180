"""Weak scaling of 2019 on the clock of the experiment megatron: 1 to 8 ranks of tensor parallelism, alone and 64 times over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.megatron.step import Run, step_of
from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.planner import Machine, find_machine

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The table of settings.toml.

    Attributes:
        machine: a preset of the planner.
        devices: of a node.
        inside: GB/s of a device to its node, each way.
        node: GB/s of a node to others.
        reached: share of both.
        sequence, vocabulary: of the models.
        rows: sequences of a group of tensor parallelism.
        batch: sequences where data parallelism is added.
    """

    machine: str
    devices: int
    inside: float
    node: float
    reached: float
    sequence: int
    vocabulary: int
    rows: int
    batch: int

    def nodes(self) -> Machine:
        """The machine; a device's share of its node's links is an equal one."""
        inside, between = (1e9 * self.reached * rate for rate in (self.inside, self.node / self.devices))
        return replace(find_machine(self.machine), devices=self.devices, inside=inside, between=between)


def setting() -> Setting:
    """The only one."""
    return read_tables(FOLDER / "settings.toml", Setting)["dgx2h"]


def everything() -> dict[str, Any]:
    """All numbers."""
    return {"rows": [row_of(row) for row in read_csv(FOLDER / "published.csv")]}


def row_of(row: Mapping[str, str]) -> dict[str, Any]:
    """A model on its ranks, and on 64 times as many; ``beside``: gradients are summed beside the backward."""
    alone, whole = run_of(row, data=False), run_of(row, data=True)
    return {
        **{key: float(value) for key, value in row.items()},
        "ours, billions": alone.parameters / 1e9,
        "ours, tensor": rate(alone),
        "ours, data": rate(whole),
        "ours, beside": rate(whole, beside=True),
        "gradients": step_of(whole, setting().nodes()).gradients,
    }


def run_of(row: Mapping[str, str], *, data: bool) -> Run:
    """All layers recomputed, as the paper trains."""
    one, tensor = setting(), int(row["tensor"])
    return Run(
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        vocabulary=one.vocabulary,
        sequence=one.sequence,
        batch=one.batch if data else one.rows,
        rows=one.rows,
        gpus=int(row["gpus_with_data"]) if data else tensor,
        tensor=tensor,
    )


def rate(run: Run, *, beside: bool = False) -> float:
    """TFLOP/s a GPU."""
    step = step_of(run, setting().nodes())
    seconds = max(step.pipeline, step.gradients) + step.optimizer if beside else step.seconds
    return run.flop(recomputed=True) / seconds / run.gpus / 1e12
