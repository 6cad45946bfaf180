"""MegaScale's tables 2 and 3 on the clock of the experiment megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.megatron.simulated import MACHINE
from experiments.megatron.step import Run, step_of
from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.planner import find_machine

FOLDER = Path(__file__).resolve().parent
PEAK = 312e12  # of an A100 in half precision


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The table of settings.toml: see :class:`Run`."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    tensor: int
    pipeline: int
    chunks: int
    window: int


def everything() -> dict[str, Any]:
    """All numbers."""
    return {
        "table 2": [row_of(row) for row in read_csv(FOLDER / "published_table2.csv")],
        "table 3": [ablation(row) for row in read_csv(FOLDER / "published_table3.csv")],
    }


def baseline(batch: int, gpus: int) -> Run:
    """Megatron-LM as the paper compares with it: nothing recomputed, attention in one kernel, sequence parallelism."""
    one = read_tables(FOLDER / "settings.toml", Setting)["model"]
    return Run(
        layers=one.layers,
        hidden=one.hidden,
        heads=one.heads,
        vocabulary=one.vocabulary,
        batch=batch,
        gpus=gpus,
        tensor=one.tensor,
        pipeline=one.pipeline,
        chunks=one.chunks,
        recompute="none",
        sequence_parallel=True,
        flash=True,
    )


def improved(run: Run, steps: int) -> Run:
    """The baseline with the first ``steps`` of table 3's changes, five at most: the others are no other work for the clock."""
    if steps > 0:
        run = replace(run, parallel_block=True)
    if steps > 1:
        run = replace(run, window=read_tables(FOLDER / "settings.toml", Setting)["model"].window)
    return replace(run, hidden_traffic=frozenset(("tensor", "pipeline", "data")[: max(steps - 2, 0)]))


def row_of(row: Mapping[str, str]) -> dict[str, Any]:
    """A row of table 2."""
    run = baseline(int(row["batch"]), int(row["gpus"]))
    return {
        "method": row["method"],
        "batch": run.batch,
        "GPUs": run.gpus,
        "published": {"seconds": float(row["seconds"]), "MFU": float(row["MFU"])},
        "ours": speed(improved(run, 5) if row["method"] == "MegaScale" else run),
    }


def ablation(row: Mapping[str, str]) -> dict[str, Any]:
    """A row of table 3; without ours where the clock has nothing to change."""
    number = int(row["row"])
    found = {"row": number, "method": row["method"], "published": float(row["MFU"])}
    if number <= 6:
        found["ours"] = speed(improved(baseline(256, 256), number - 1))["MFU"]
    if number == 9:
        found["ours"] = speed(improved(baseline(768, 256), 5))["MFU"]
    return found


def speed(run: Run) -> dict[str, float]:
    """Seconds of a step, and MFU: FLOP of the model with attention to all tokens, by the data sheet's peak."""
    seconds = step_of(run, find_machine(MACHINE)).seconds
    return {"seconds": seconds, "MFU": run.flop(recomputed=False) / seconds / run.gpus / PEAK}
