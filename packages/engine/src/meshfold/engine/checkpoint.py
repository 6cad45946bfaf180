"""Checkpoints: a folder with whole tensors, whatever the mesh, so that any other spec can load it.

::

    model.safetensors       the model's state dict (float32 masters under bf16 and fp16), tied tensors once
    optimizer.safetensors   the optimizer's tensors, "parameter name/state name", whole like the parameter
    scheduler.pt            the learning-rate scheduler, if there is one
    state.json              everything else; its presence says that the folder is complete

Rank 0 writes, tensor by tensor: no rank ever holds more than one whole tensor beside its own blocks. The folder gets
its name once all is on the disk; an older checkpoint of that name is kept until then. Every rank reads, through a
memory map, the part of the file that is its own, so all of them must see the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from meshfold.engine.errors import CheckpointError
from meshfold.engine.states import Source
from meshfold.engine.tensor_file import Described, TensorFile, TensorWriter, writing_order
from meshfold.engine.world import World
from meshfold.mesh import all_reduce

FORMAT = 1
MODEL, OPTIMIZER, SCHEDULER, STATE = (
    "model.safetensors",
    "optimizer.safetensors",
    "scheduler.pt",
    "state.json",
)


def write_checkpoint(
    path: str | os.PathLike[str],
    world: World,
    files: dict[str, dict[str, Source]],
    state: dict[str, Any],
    scheduler: dict[str, Any] | None,
    *,
    all_read: bool,
) -> None:
    """Write a checkpoint. All ranks must call; all of them raise if rank 0 could not write.

    Args:
        path: the folder; made with its parents, or replaced.
        world: where the tensors lie.
        files: file name to its tensors, alike on every rank.
        state: what goes into ``state.json``.
        scheduler: the scheduler's state, if any.
        all_read: every rank has a part of the tensors; else the first data coordinate has all of them.

    Raises:
        CheckpointError: if the folder could not be written.
    """
    target = Path(path).absolute()
    writing = target.with_name(f".{target.name}.writing")
    error: Exception | None = None
    if world.mesh.rank == 0:
        error = _attempt(lambda: _begin(writing))
    for name, sources in files.items():
        found = _write_tensors(writing / name, world, sources, error, all_read)
        error = error or found
    if world.mesh.rank == 0 and error is None:
        error = _attempt(lambda: _finish(writing, target, {"format": FORMAT, **state}, scheduler))
    failed = all_reduce(torch.tensor([int(error is not None)], device=world.device), world.everyone, "max")
    if failed.item():
        if error is not None:
            with suppress(OSError):
                shutil.rmtree(writing)
            raise CheckpointError(f"cannot write the checkpoint {target}: {error}") from error
        raise CheckpointError(f"rank 0 could not write the checkpoint {target}: its own message says why")


def _write_tensors(
    path: Path, world: World, sources: dict[str, Source], error: Exception | None, all_read: bool
) -> Exception | None:
    """Gather each tensor, once, among the ranks that have a part of it; rank 0 appends it to the file."""
    if world.data_index != 0 and not all_read:
        return None
    announced = {name: Described(dtype=source.dtype, shape=source.shape) for name, source in sources.items()}
    writer: TensorWriter | None = None
    if world.mesh.rank == 0 and error is None:
        try:
            writer = TensorWriter(path, announced)
        except (OSError, CheckpointError) as found:
            error = found
    for name in writing_order(announced):
        whole = sources[name].read()  # also after an error: the other ranks are in it
        if writer is not None and error is None:
            try:
                writer.write(name, whole)
            except (OSError, CheckpointError) as found:
                error = found
        del whole
    if writer is not None and error is None:
        error = _attempt(writer.close)
    return error


class Checkpoint:
    """A checkpoint on disk, open for reading."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises:
        CheckpointError: if there is none, or it was written by a newer version.
        """
        target = Path(path).absolute()
        # Between the two renames of a replacement only the old one is there: see _finish.
        old = target.with_name(f".{target.name}.old")
        self.path = old if not (target / STATE).exists() and (old / STATE).exists() else target
        if not (self.path / STATE).exists():
            what = "is no complete checkpoint: it has no state.json" if target.is_dir() else "does not exist"
            raise CheckpointError(f"cannot load {target}: it {what}")
        try:
            self.state: dict[str, Any] = json.loads((self.path / STATE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self.path / STATE}: {error}") from error
        if self.state.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.path} has format {self.state.get('format')!r}, this version of Meshfold reads format {FORMAT}"
            )

    @property
    def model(self) -> TensorFile:
        """The model's tensors, by name."""
        return TensorFile(self.path / MODEL)

    @property
    def optimizer(self) -> TensorFile:
        """The optimizer's tensors, by ``parameter/state``."""
        return TensorFile(self.path / OPTIMIZER)

    @property
    def scheduler(self) -> dict[str, Any] | None:
        """The scheduler's state, if it was saved."""
        path = self.path / SCHEDULER
        if not path.exists():
            return None
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found


def _begin(writing: Path) -> None:
    if writing.exists():  # left by a run that died
        shutil.rmtree(writing)
    writing.mkdir(parents=True)


def _finish(writing: Path, target: Path, state: dict[str, Any], scheduler: dict[str, Any] | None) -> None:
    """Write what is small, bring the folder to the disk and give it its name."""
    if scheduler is not None:
        torch.save(scheduler, writing / SCHEDULER)
    with (writing / STATE).open("w") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(writing)
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        if not (target / STATE).exists() and any(target.iterdir()):
            raise OSError(f"{target} is there and is no checkpoint: remove it or choose another path")
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    writing.rename(target)
    _sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _attempt(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except (OSError, TypeError, ValueError, CheckpointError) as error:
        return error
    return None
