"""What of an engine goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from meshfold.engine.checkpoint import MODEL, OPTIMIZER, Checkpoint, write_checkpoint
from meshfold.engine.errors import CheckpointError

if TYPE_CHECKING:
    from meshfold.engine.engine import Engine


def save(engine: Engine, path: str | os.PathLike[str]) -> None:
    """See :meth:`Engine.save`."""
    done = engine.micro_step % engine._accumulation
    if done:
        raise CheckpointError(
            f"save() after {done} of {engine._accumulation} micro-steps of an accumulation would lose their gradients: "
            "save when engine.last.stepped is true"
        )
    files = {MODEL: engine._model_state.sources()}
    loaders = {name: loader.state_dict() for name, loader in engine._loaders.items()}
    state: dict[str, Any] = {
        "spec": str(engine.spec.to_dict()),
        "precision": engine._precision.name,
        "seed": engine._seed,
        "step": engine.step,
        "micro_step": engine.micro_step,
        "skipped_steps": engine.skipped_steps,
        "scaler": engine._scaler.state_dict(),
        "ties": engine._model_state.ties(),
        "data": {**engine._positions, **loaders},
    }
    if engine.optimizer is not None:
        files[OPTIMIZER] = engine._states.optimizer_sources()
        state["optimizer"] = engine._states.optimizer_description()
    scheduler = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    write_checkpoint(path, engine._world, files, state, scheduler, all_read=engine._states.all_read)


def load(engine: Engine, path: str | os.PathLike[str], *, weights_only: bool) -> None:
    """See :meth:`Engine.load`."""
    found = Checkpoint(path)
    engine._model_state.load(found.model)
    if weights_only:
        return
    state = found.state
    if engine.optimizer is not None and "optimizer" in state:
        engine._states.load_optimizer(state["optimizer"], found.optimizer)
    scheduler = found.scheduler
    if engine.lr_scheduler is not None and scheduler is not None:
        engine.lr_scheduler.load_state_dict(scheduler)
    engine._scaler.load_state_dict(state["scaler"])
    engine._seed = int(state["seed"])
    engine.step, engine.micro_step = int(state["step"]), int(state["micro_step"])
    engine.skipped_steps = int(state["skipped_steps"])
    engine._positions = dict(state["data"])
    for name, loader in engine._loaders.items():
        if name in engine._positions:
            loader.load_state_dict(engine._positions.pop(name))
