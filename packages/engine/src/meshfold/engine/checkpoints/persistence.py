"""What of an engine goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from meshfold.engine.checkpoints.checkpoint import BLOCKS, MODEL, OPTIMIZER, Checkpoint, write_checkpoint
from meshfold.engine.checkpoints.optimizer_state import check
from meshfold.engine.errors import CheckpointError
from meshfold.engine.hugging_face.our_names import describe
from meshfold.engine.names import with_plain_names
from meshfold.engine.together import fail_together

if TYPE_CHECKING:
    from meshfold.engine.checkpoints.background_save import BackgroundSave
    from meshfold.engine.engine import Engine


def save(engine: Engine, path: str | os.PathLike[str], *, asynchronous: bool) -> BackgroundSave | None:
    """See :meth:`Engine.save`."""
    _check_path(path, "save")
    if engine._backwards:
        done = (
            f"{engine._place} of {engine._accumulation} micro-steps of an accumulation: save when engine.last.stepped is true"
            if engine._place
            else f"{engine._backwards} backwards without a step: save after engine.step() or engine.zero_grad()"
        )
        raise CheckpointError(f"save() would lose the gradients of {done}")
    files = {MODEL: engine._model_state.sources()}
    state: dict[str, Any] = {
        "spec": str(engine.spec.to_dict()),
        "precision": engine._precision.name,
        "seed": engine._seed,
        "step": engine.steps,
        "micro_step": engine.micro_step,
        "skipped_steps": engine.skipped_steps,
        "scaler": engine._scaler.state_dict(),
        "ties": engine._model_state.ties(),
        "model": describe(engine.model),
        "data": engine._data.state_dict(),
    }
    if engine.optimizer is not None:
        files[OPTIMIZER] = engine._model_state.optimizer_sources()
        state["optimizer"] = engine._model_state.optimizer_description()
    scheduler = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    if asynchronous:
        return engine._saver.start(path, files, {"format": BLOCKS, **state}, scheduler)
    engine._saver.finish()  # saves are in the order of their calls
    write_checkpoint(path, engine._world, files, state, scheduler, all_read=engine._states.all_read)
    return None


def load(engine: Engine, path: str | os.PathLike[str], *, weights_only: bool, verify: bool) -> None:
    """See :meth:`Engine.load`."""
    _check_path(path, "load")
    engine._saver.finish()
    engine._saver.before_change()
    error: Exception | None = None
    try:
        found = Checkpoint(path)
        model, optimizer = found.model, found.optimizer if "optimizer" in found.state else {}
        if verify:
            found.verify(engine.mesh.rank, engine.mesh.world_size, weights_only=weights_only)
        if engine.optimizer is not None and not weights_only and "optimizer" not in found.state:
            raise CheckpointError(
                f"it has no state of an optimizer, and this engine has {type(engine.optimizer).__name__}: "
                "load(path, weights_only=True) takes its weights"
            )
        if engine.optimizer is not None and not weights_only:
            check(engine.optimizer, found.state["optimizer"])  # while the model is still as it was
    except Exception as wrong:  # also a folder that this rank alone may not read
        error = wrong
    fail_together(engine._world, error, f"load({str(path)!r})")
    engine.zero_grad()  # those since the last step are of other weights
    engine._model_state.load(model)
    if weights_only:
        return
    state = found.state
    if engine.optimizer is not None and "optimizer" in state:
        saved = state["optimizer"]
        saved["values"] = with_plain_names(saved["values"])
        engine._model_state.load_optimizer(saved, with_plain_names(optimizer))
    scheduler = found.scheduler
    if (engine.lr_scheduler is None) != (scheduler is None) and engine.mesh.rank == 0:
        warnings.warn(_of_one_scheduler(engine, str(path)), stacklevel=3)
    if engine.lr_scheduler is not None and scheduler is not None:
        engine.lr_scheduler.load_state_dict(scheduler)
    if state["precision"] == engine._precision.name:  # others had no loss scale, which is not the scale 1
        engine._scaler.load_state_dict(state["scaler"])
    engine._seed = int(state["seed"])
    engine.steps, engine.micro_step = int(state["step"]), int(state["micro_step"])
    engine.skipped_steps = int(state["skipped_steps"])
    engine._data.load_state_dict(state["data"])


def _check_path(path: object, what: str) -> None:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"{what}({path!r}): the path of a folder, a str or a Path")


def _of_one_scheduler(engine: Engine, path: str) -> str:
    if engine.lr_scheduler is None:
        return f"{path} has the state of an lr_scheduler, and this engine has none: the learning rate stays as it is"
    return f"{path} has no state of an lr_scheduler: that of this engine begins at its first step"
