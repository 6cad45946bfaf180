"""Both tables of SC'21 on the clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.megatron.step import Run, step_of
from experiments.report import read_csv
from meshfold.planner import find_machine

FOLDER = Path(__file__).resolve().parent
MACHINE = "a100x8"
SIZES: dict[str, dict[str, Any]] = {
    "174.6": dict(layers=96, hidden=12288, heads=96),
    "529.6": dict(layers=105, hidden=20480, heads=128),
}
"""Shapes of table 2's models, which table 1 and its text name."""
TOKENS = 300e9  # of table 2's days


def everything() -> dict[str, Any]:
    """All numbers."""
    return {
        "table 1": [one(run_of(row), row) for row in read_csv(FOLDER / "published_table1.csv")],
        "table 2": [one(compared(row), row) for row in read_csv(FOLDER / "published_table2.csv")],
    }


def run_of(row: Mapping[str, str]) -> Run:
    """A row of table 1; micro-batches of one sequence."""
    layers, pipeline = int(row["layers"]), int(row["pipeline"])
    return Run(
        layers=layers,
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        batch=int(row["batch"]),
        gpus=int(row["gpus"]),
        tensor=int(row["tensor"]),
        pipeline=pipeline,
        chunks=chunks(layers, pipeline),
    )


def compared(row: Mapping[str, str]) -> Run:
    """A row of table 2: tensor parallelism over 8 and a pipeline, or ZeRO-3."""
    batch, gpus, rows, sizes = int(row["batch"]), int(row["gpus"]), int(row["rows"]), SIZES[row["params_B"]]
    if row["scheme"] == "ZeRO-3":
        return Run(batch=batch, gpus=gpus, rows=rows, sharded=True, **sizes)
    pipeline = int(row["ranks_of_model"]) // 8
    split: dict[str, Any] = dict(tensor=8, pipeline=pipeline, chunks=chunks(sizes["layers"], pipeline))
    return Run(batch=batch, gpus=gpus, rows=rows, **split, **sizes)


def chunks(layers: int, pipeline: int) -> int:
    """Chunks of a rank's layers in the interleaved schedule, which the tables do not name: as few as there can be."""
    per_stage = layers // pipeline
    return 1 if pipeline == 1 else next((v for v in range(2, per_stage + 1) if per_stage % v == 0), 1)


def one(run: Run, row: Mapping[str, str]) -> dict[str, Any]:
    """A row: the printed numbers, and ours."""
    step = step_of(run, find_machine(MACHINE))
    return {
        **{key: value if key == "scheme" else float(value) for key, value in row.items()},
        "micro-batches": run.microbatches,
        "chunks": run.chunks,
        "ours, seconds": step.seconds,
        "ours, TFLOP/s": run.flop(recomputed=True) / step.seconds / run.gpus / 1e12,
        "ours, parameters": run.parameters / 1e9,
        "ours, days": TOKENS / (run.batch * run.sequence) * step.seconds / 86400,
        "parts": {"pipeline": step.pipeline, "gradients": step.gradients, "optimizer": step.optimizer},
    }
