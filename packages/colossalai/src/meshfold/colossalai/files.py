"""Saving and loading for ``Booster``: a model, an optimizer, a schedule, each in its own file or folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.files import read_torch_file, write_atomically
from meshfold.checkpoint.folder import EXTRA_STATE_FILE, STATE_FILE
from meshfold.checkpoint.state import split_extra_state
from meshfold.checkpoint.tensors import SAFETENSORS_SUFFIX, TensorInfo, TensorWriter, open_weights
from meshfold.colossalai import tables
from meshfold.colossalai.arguments import Argument, translate
from meshfold.colossalai.training import TrainingEngine
from meshfold.engine.checkpoints import MODEL_FILE, write_checkpoint
from meshfold.engine.world import fail_together
from meshfold.mesh import Mesh, barrier

_Path = str | os.PathLike[str]


def save_model(engine: TrainingEngine, path: _Path, given: Mapping[str, Any]) -> None:
    """Write the weights: one file, or with ``shard=True`` a folder that all ranks write, one tensor at a time.

    A file is in safetensors format if its name ends in ``.safetensors`` or ``use_safetensors`` is True, else in torch.save's.
    ``engine.load(folder, weights_only=True)`` reads the folder, whose files are named as by Hugging Face.
    """
    found = translate("save_model", given, tables.SAVE)
    found.say("save_model", rank=engine.mesh.rank)
    aside = found.under("aside")
    if aside.get("shard"):
        files = {MODEL_FILE: engine.model_state.sources()}
        plain, more = split_extra_state(engine.model_state.extra(f"save_model({str(path)!r})"))
        state = {"spec": str(engine.spec.to_dict()), "ties": engine.model_state.ties(), "extra_state": plain}
        small = {EXTRA_STATE_FILE: more} if more else {}
        write_checkpoint(path, engine.world, files, state, small, all_read=engine.states.all_read)
        return
    whole = engine.full_state_dict()
    safe = bool(aside.get("use_safetensors")) or str(path).endswith(SAFETENSORS_SUFFIX)
    _first_writes(engine, Path(path), lambda target: _write(target, whole, safe, engine.model_state.ties()))


def load_model(engine: TrainingEngine, path: _Path, given: Mapping[str, Any]) -> None:
    """Load weights from a file or a folder: one of :func:`save_model`, of ``engine.save``, of Colossal-AI's ``save_model``, or
    of Hugging Face under the model's own names; safetensors or torch's own."""
    translate("load_model", given, tables.LOAD).say("load_model", rank=engine.mesh.rank)
    place = Path(path)
    if (place / STATE_FILE).exists():
        engine.load(place, weights_only=True)
        return
    error: Exception | None = None
    state: Mapping[str, Tensor] = {}
    try:
        state = open_weights(place)
    except Exception as unread:  # perhaps on this rank only
        error = unread
    fail_together(engine.world, error, f"load_model({str(path)!r})")
    engine.load_state_dict(state)


def save_optimizer(engine: TrainingEngine, path: _Path, given: Mapping[str, Any]) -> None:
    """Write a folder to resume training from, under any spec: ``engine.save(path)``."""
    table = {**tables.SAVE, "shard": Argument(default=True, word="it is a folder that all ranks write")}
    translate("save_optimizer", given, table).say("save_optimizer", rank=engine.mesh.rank)
    engine.save(path)


def load_optimizer(engine: TrainingEngine, path: _Path, given: Mapping[str, Any]) -> None:
    """Resume from such a folder, or any other of ``engine.save``: weights, optimizer, counters, loss scale."""
    translate("load_optimizer", given, tables.LOAD).say("load_optimizer", rank=engine.mesh.rank)
    engine.load(path)


def save_lr_scheduler(mesh: Mesh, scheduler: Any, path: _Path) -> None:
    """Write a schedule's state to a file, on the first rank; all must call.

    Raises:
        CheckpointError: on the first rank, if it cannot be written.
    """
    target = Path(path)
    try:
        if mesh.rank == 0:
            _beside(target, lambda beside: torch.save(scheduler.state_dict(), beside))
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        if mesh.world_size > 1:
            barrier(mesh.group(*mesh.names))


def load_lr_scheduler(scheduler: Any, path: _Path) -> None:
    """Load a schedule's state with its rates.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    try:
        state = read_torch_file(Path(path))
    except CheckpointError as error:
        raise CheckpointError(f"load_lr_scheduler({str(path)!r}): {error}") from error
    scheduler.load_state_dict(state)
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def _write(target: Path, whole: Mapping[str, Tensor], safe: bool, ties: Mapping[str, str]) -> None:
    if not safe:
        torch.save(dict(whole), target)
        return
    if odd := [name for name, value in whole.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{odd[0]!r} is extra state and no tensor, which safetensors files cannot hold: save_model(..., shard=True) can"
        )
    once = {name: value for name, value in whole.items() if name not in ties}
    announced = {name: TensorInfo(dtype=value.dtype, shape=tuple(value.shape)) for name, value in once.items()}
    with TensorWriter(target, announced) as writer:
        for name in writer.order:
            writer.write(name, once[name])


def _first_writes(engine: TrainingEngine, path: Path, write: Callable[[Path], None]) -> None:
    """Write a file on the first rank; all ranks raise if that fails."""
    error: Exception | None = None
    if engine.mesh.rank == 0:
        try:
            _beside(path, write)
        except Exception as unwritten:
            error = unwritten
    fail_together(engine.world, error, f"cannot write {path}")


def _beside(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name and rename it when complete; make its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)
