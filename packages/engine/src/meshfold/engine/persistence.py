"""The state of an engine, to and from a checkpoint."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.folder import EXTRA_STATE_FILE, SCHEDULER_FILE
from meshfold.checkpoint.state import FORMAT_SHARDED, split_extra_state
from meshfold.engine.checkpoints.checkpoint import MODEL_FILE, OPTIMIZER_FILE, Checkpoint, write_checkpoint
from meshfold.engine.checkpoints.model_state import describe_model, with_plain_names
from meshfold.engine.states.optimizer_state import check_shapes
from meshfold.engine.states.protocols import Source, Sources
from meshfold.engine.world import fail_together
from meshfold.mesh import all_reduce

if TYPE_CHECKING:
    from meshfold.engine.checkpoints.saving import BackgroundSave
    from meshfold.engine.engine import Engine


def save_checkpoint(engine: Engine, path: str | os.PathLike[str], *, asynchronous: bool) -> BackgroundSave | None:
    """See :meth:`Engine.save`."""
    _check_path(path, "save")
    gradients = engine.runner.gradients
    micro_steps, backwards = gradients.micro_steps, gradients.backwards
    if backwards:
        done = (
            f"{micro_steps} of {engine.runner.accumulation} micro-steps of an accumulation: save when engine.last.stepped is true"
            if micro_steps
            else f"{backwards} backwards without a step: save after engine.step() or engine.zero_grad()"
        )
        raise CheckpointError(f"save() would lose the gradients of {done}")
    kept = engine.model_state
    files: dict[str, dict[str, Source]] = {}
    noted: dict[str, Sources] = {}
    if asynchronous:
        noted[MODEL_FILE], ties = kept.noted_sources_and_ties()
    else:
        files[MODEL_FILE], ties = kept.sources(), kept.ties()
    state: dict[str, Any] = {
        "spec": str(engine.spec.to_dict()),
        "precision": engine.precision.name,
        "seed": engine.runner.seed,
        "step": engine.steps,
        "micro_step": engine.micro_step,
        "skipped_steps": engine.skipped_steps,
        "scaler": engine.runner.scaler.state_dict(),
        "ties": ties,
        "model": describe_model(engine.model),
        "data": engine.data_positions.state_dict(),
    }
    if engine.optimizer is not None:
        if asynchronous:
            noted[OPTIMIZER_FILE] = kept.noted_optimizer_sources()
        else:
            files[OPTIMIZER_FILE] = kept.optimizer_sources()
        state["optimizer"] = kept.optimizer_description()
    state["extra_state"], more = split_extra_state(kept.extra(f"save({str(path)!r})"))
    small = {EXTRA_STATE_FILE: more} if more else {}
    if engine.lr_scheduler is not None:
        small[SCHEDULER_FILE] = engine.lr_scheduler.state_dict()
    if asynchronous:
        return engine.saver.start(path, noted, {"format": FORMAT_SHARDED, **state}, small)
    engine.saver.finish()  # saves complete in the order of their calls
    write_checkpoint(path, engine.world, files, state, small, all_read=engine.states.all_read)
    return None


def load_checkpoint(engine: Engine, path: str | os.PathLike[str], *, weights_only: bool, verify: bool) -> None:
    """See :meth:`Engine.load`."""
    _check_path(path, "load")
    engine.saver.finish()
    engine.saver.before_change()
    engine.runner.forward.weights_change()
    optimizer: Mapping[str, Tensor] = {}
    scheduler: dict[str, Any] | None = None
    error: Exception | None = None
    mark = 0
    extra: dict[str, Any] = {}
    try:
        found = Checkpoint(path)
        state, model, mark = found.state, found.model, found.mark
        extra = {**engine.model_state.extra_in(model), **found.extra_state}
        if not weights_only:
            scheduler = found.scheduler
            if "optimizer" in state:
                optimizer = with_plain_names(found.optimizer)
        if verify:
            found.verify(engine.mesh.rank, engine.mesh.world_size, weights_only=weights_only)
        given = engine.model_state.check(model)
        if not weights_only:
            _check_rest(engine, state, optimizer)
    except Exception as wrong:  # also a folder that only this rank cannot read
        error = wrong
    what = f"load({str(path)!r})"
    fail_together(engine.world, error, what)
    _check_same(engine, mark, what)
    if not weights_only:
        engine.data_positions.check(state["data"])
        if engine.lr_scheduler is not None and scheduler is not None:
            _take_schedule(engine.lr_scheduler, scheduler, what)
    engine.model_state.load_extra(extra, what)
    # All checks have passed: from here on the engine changes.
    engine.zero_grad()  # they belong to the old weights
    engine.model_state.write(given)
    if weights_only:
        return
    if engine.optimizer is not None:
        engine.model_state.load_optimizer(state["optimizer"], optimizer)
    if (engine.lr_scheduler is None) != (scheduler is None) and engine.mesh.rank == 0:
        warnings.warn(_of_one_scheduler(engine, str(path)), stacklevel=3)
    runner = engine.runner
    if state["precision"] == engine.precision.name:  # another precision's loss scale does not apply
        runner.scaler.load_state_dict(state["scaler"])
    runner.seed = int(state["seed"])
    runner.steps, runner.micro_step = int(state["step"]), int(state["micro_step"])
    runner.skipped_steps = int(state["skipped_steps"])
    engine.data_positions.load_state_dict(state["data"])


_COUNTERS = ("precision", "scaler", "seed", "step", "micro_step", "skipped_steps", "data")


def _check_rest(engine: Engine, state: dict[str, Any], optimizer: Mapping[str, Tensor]) -> None:
    """Check that a checkpoint's state, except weights, fits the engine; change nothing."""
    takes = "load(path, weights_only=True) takes its weights"
    if lacking := [name for name in _COUNTERS if name not in state]:
        by = "a Lightning trainer wrote it" if state.get("kind") == "lightning" else "it is damaged"
        raise CheckpointError(f"its state.json has no {', '.join(lacking)}: {by}; {takes}")
    if engine.optimizer is None:
        return
    if "optimizer" not in state:
        raise CheckpointError(
            f"it has no optimizer state, but this engine has {type(engine.optimizer).__name__}: {takes}"
        )
    saved = state["optimizer"]
    saved["values"] = with_plain_names(saved["values"])
    engine.model_state.check_optimizer(saved, optimizer)
    check_shapes(optimizer, {name: source.shape for name, source in engine.model_state.sources().items()})


def _check_same(engine: Engine, mark: int, what: str) -> None:
    """Check that all ranks have opened the same checkpoint: another run may have replaced it in the meantime."""
    if engine.mesh.world_size == 1:
        return
    marks = torch.tensor([mark, -mark], device=engine.device)
    least, most = all_reduce(marks, engine.world.everyone, "min").tolist()
    if least != -most:
        raise CheckpointError(
            f"{what}: it was replaced while the ranks opened it, so they opened different checkpoints: another process saves "
            "there. Load it again when that one has ended"
        )


def _take_schedule(scheduler: Any, state: dict[str, Any], what: str) -> None:
    """Restore a scheduler's saved state, or leave it unchanged on an error."""
    before = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(state)
    except Exception as error:
        scheduler.load_state_dict(before)
        raise CheckpointError(
            f"{what}: the state of its lr_scheduler does not fit {type(scheduler).__name__} "
            f"({type(error).__name__}: {error}): give the scheduler that it was saved with, or load(path, weights_only=True)"
        ) from error


def _check_path(path: object, what: str) -> None:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"{what}({path!r}): give the path of a folder, a str or a Path")


def _of_one_scheduler(engine: Engine, path: str) -> str:
    if engine.lr_scheduler is None:
        return f"{path} has the state of an lr_scheduler, and this engine has none: the learning rate stays as it is"
    return f"{path} has no state of an lr_scheduler: that of this engine begins at its first step"
