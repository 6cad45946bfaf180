"""The loop around a trainer: metrics, checkpoints of all its engines, and resuming in the middle of a run.

What rank 0 writes into the folder ``out``::

    metrics.jsonl           a line a step
    step-00000020/policy/   the engines' checkpoints, loadable under any other spec; of PPO a folder ``critic`` too
    latest.json             which of them is complete: it is written once all engines are saved

A trainer's step depends only on its number and its engines, so a run that resumes from a checkpoint makes the same steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.files import name_in_errors, parse_json_object, write_atomically
from meshfold.engine import Engine
from meshfold.mesh import SpecError, barrier

_LATEST, _METRICS = "latest.json", "metrics.jsonl"


class Trainer(Protocol):
    """Protocol of what :func:`fit` runs.

    Attributes:
        engines: by name; none on a rank that only generates.
    """

    engines: dict[str, Engine]

    def step(self, number: int) -> dict[str, float]:
        """Make a step, whose number counts from 0, and return its metrics; all ranks must call."""


def fit(
    trainer: Trainer,
    steps: int,
    out: str | None = None,
    *,
    save_every: int = 0,
    resume: bool = False,
    show: Callable[[int, Mapping[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Run a trainer; every rank calls.

    Args:
        trainer: such as :class:`meshfold.align.DPO`.
        steps: of the whole run, including those before a resume.
        out: a folder for metrics and checkpoints; None: nothing is written.
        save_every: steps between checkpoints; 0: one at the end.
        resume: go on from the folder's last checkpoint.
        show: called on rank 0 with each step's number, from 1, and its metrics.

    Returns:
        The metrics of the steps made here.

    Raises:
        SpecError: for a folder with a run in it and no ``resume``, or ``resume`` without a folder.
        CheckpointError: if there is nothing to resume from.
    """
    first, rank = 0, next((engine.mesh.rank for engine in trainer.engines.values()), None)
    if resume and out is None:
        raise SpecError("resume=True without out: give the folder of the run")
    if out is not None:
        there = latest_step(out)
        if resume:
            if there is None:
                raise CheckpointError(f"{out!r} has no checkpoint to resume from: it holds no {_LATEST}")
            for name, engine in trainer.engines.items():
                engine.load(step_path(out, there, name))
            first = there
        elif there is not None:
            raise SpecError(
                f"{out!r} has a run of {there} steps already: write resume=True (--resume), or give another folder"
            )
        if rank == 0:
            Path(out).mkdir(parents=True, exist_ok=True)
            _keep_metrics(Path(out) / _METRICS, first)
    found = []
    for number in range(first, steps):
        metrics = trainer.step(number)
        found.append(metrics)
        if rank == 0:
            if out is not None:
                path = Path(out) / _METRICS
                with name_in_errors(path), path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(dict(step=number + 1, **metrics)) + "\n")
            if show is not None:
                show(number + 1, metrics)
        if (
            out is not None
            and trainer.engines
            and (number + 1 == steps or (save_every and (number + 1) % save_every == 0))
        ):
            _save(trainer.engines, out, number + 1)
    return found


def latest_step(out: str) -> int | None:
    """Return the step of a folder's last complete checkpoint; None if there is none."""
    file = Path(out) / _LATEST
    if not file.is_file():
        return None
    step = parse_json_object(file.read_bytes()).get("step")
    if not isinstance(step, int):
        raise CheckpointError(f"{str(file)!r} names no step: it is damaged")
    return step


def step_path(out: str, step: int, name: str = "policy") -> str:
    """Return the folder of an engine's checkpoint."""
    return str(Path(out) / f"step-{step:08d}" / name)


def run_checkpoint(out: str, name: str = "policy") -> str | None:
    """Return a run's last checkpoint of an engine, or of the policy if it has no such engine; None if there is none."""
    step = latest_step(out)
    if step is None:
        return None
    found = step_path(out, step, name)
    return found if Path(found).is_dir() else step_path(out, step)


def in_micro_steps(batch: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """Split a batch into parts with equal numbers of rows; the first parts get one more if some are left.

    Raises:
        SpecError: for more parts than rows.
    """
    rows = len(batch["labels"])
    if not 1 <= parts <= rows:
        raise SpecError(
            f"{rows} rows in micro_steps={parts}: each has a row at least; write micro_steps={max(rows, 1)} or less"
        )
    places = torch.arange(rows).tensor_split(parts)
    return [
        {
            name: value[part] if isinstance(value, Tensor) and value.dim() and len(value) == rows else value
            for name, value in batch.items()
        }
        for part in places
    ]


def _save(engines: Mapping[str, Engine], out: str, step: int) -> None:
    """Save all engines, then say that they are complete, and remove those before."""
    first = next(iter(engines.values()))
    for name, engine in engines.items():
        engine.save(step_path(out, step, name))
    if first.mesh.rank == 0:
        write_atomically(
            Path(out) / _LATEST, lambda path: path.write_text(json.dumps(dict(step=step)), encoding="utf-8")
        )
        for folder in Path(out).glob("step-*"):
            if folder.name != f"step-{step:08d}":
                shutil.rmtree(folder)
    barrier(first.world.everyone, first.device)


def _keep_metrics(file: Path, steps: int) -> None:
    """Cut the metrics to those of the steps that are kept."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() and steps else []
    kept = [line for line in lines if parse_json_object(line.encode())["step"] <= steps]
    write_atomically(file, lambda path: path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8"))
