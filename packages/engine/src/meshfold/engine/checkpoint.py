"""Checkpoints: a folder with whole tensors, whatever the mesh, so that any other spec can load it.

::

    model.safetensors       the model's state dict (float32 masters under bf16 and fp16), tied tensors once
    optimizer.safetensors   the optimizer's tensors, "parameter name/state name", whole like the parameter
    scheduler.pt            the learning-rate scheduler, if there is one
    state.json              everything else; its presence says that the folder is complete

A large file is several, with an index (:mod:`meshfold.engine.tensor_files`): tensors are dealt to the ranks, and each
rank writes its own while the others gather the next. No rank ever holds more than two whole tensors beside its own
blocks: one that is written and one that is gathered. The folder gets its name once all of it is on the disk, from all
ranks; an older checkpoint of that name is kept until then. Every rank reads, through a memory map, the parts of the
files that are its own. So all ranks must see the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.engine.errors import CheckpointError
from meshfold.engine.states import Source
from meshfold.engine.tensor_file import Described, writing_order
from meshfold.engine.tensor_files import Deal, WriterBehind, open_tensors
from meshfold.engine.together import fail_together
from meshfold.engine.world import World

FORMAT = 2
_READ = (1, 2)  # 1 has each file whole
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
    """Write a checkpoint. All ranks must call; all of them raise if one could not write.

    Args:
        path: the folder; made with its parents, or replaced.
        world: where the tensors lie.
        files: file name to its tensors, alike on every rank.
        state: what goes into ``state.json``.
        scheduler: the scheduler's state, if any.
        all_read: every rank has a part of the tensors; else each data coordinate has all of them.

    Raises:
        CheckpointError: if the folder could not be written. A checkpoint that was there before still is.
    """
    target = _place(path)
    writing = target.with_name(f".{target.name}.writing")
    what, first = f"cannot write the checkpoint {target}", world.mesh.rank == 0
    deals = [_deal(name, sources, world) for name, sources in files.items()]
    with ExitStack() as mine:  # of the first rank: the folder, while it is written
        fail_together(world, _attempt(lambda: _begin(writing, target, mine)) if first else None, what)
        error: Exception | None = None
        for deal, sources in zip(deals, files.values(), strict=True):
            error = _write_tensors(writing, deal, sources, world, all_read=all_read, error=error)
        fail_together(world, error, what)
        error = None
        if first:
            error = _attempt(lambda: _finish(writing, target, deals, {"format": FORMAT, **state}, scheduler))
        fail_together(world, error, what)


def _deal(name: str, sources: dict[str, Source], world: World) -> Deal:
    announced = {key: Described(dtype=source.dtype, shape=source.shape) for key, source in sources.items()}
    differ = [key for key, source in sources.items() if not source.alike]
    return Deal.make(name, announced, world.mesh.world_size, differ)


def _write_tensors(
    folder: Path,
    deal: Deal,
    sources: dict[str, Source],
    world: World,
    *,
    all_read: bool,
    error: Exception | None,
) -> Exception | None:
    """Gather each tensor, once, among ranks that have it together; its writer writes it. What failed here, if anything."""
    rank, members = world.mesh.rank, world.members
    writer: WriterBehind | None = None
    if rank in deal.writers and error is None:
        try:
            writer = WriterBehind(folder / deal.file_of(rank), deal.share(rank))
        except Exception as refused:
            error = refused
    for name in writing_order(deal.announced):
        chosen = deal.writer_of[name]
        if not all_read and chosen not in members:
            continue
        try:
            whole = sources[name].read()  # also after an error: the other ranks are in it
        except Exception as unread:
            error = error or unread
            continue
        if writer is not None and chosen == rank and error is None:
            error = _attempt(partial(writer.write, name, whole))
        del whole
    if writer is not None:
        found = _attempt(partial(writer.close, complete=error is None))
        error = error or found
    return error


class Checkpoint:
    """A checkpoint on disk, open for reading."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises:
        CheckpointError: if there is none, or it was written by a newer version.
        """
        target = _place(path)
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
        if self.state.get("format") not in _READ:
            raise CheckpointError(
                f"{self.path} has format {self.state.get('format')!r}, this version of Meshfold reads up to format {FORMAT}"
            )

    @property
    def model(self) -> Mapping[str, Tensor]:
        """The model's tensors, by name."""
        return open_tensors(self.path, MODEL)

    @property
    def optimizer(self) -> Mapping[str, Tensor]:
        """The optimizer's tensors, by ``parameter/state``."""
        return open_tensors(self.path, OPTIMIZER)

    @property
    def scheduler(self) -> dict[str, Any] | None:
        """The scheduler's state, if it was saved."""
        path = self.path / SCHEDULER
        if not path.exists():
            return None
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found


def _place(path: str | os.PathLike[str]) -> Path:
    """The folder; of a link to one that which it points to, so that the link stays."""
    found = Path(path).absolute()
    return Path(os.path.realpath(found)) if found.is_symlink() else found


def _begin(writing: Path, target: Path, mine: ExitStack) -> None:
    """Make the folder that is written, for this process alone until the end of ``mine``, when what is left of it goes."""
    _check_free(target)
    _make(writing.parent)
    if writing.exists():  # left by a run that died
        with _locked(writing):
            shutil.rmtree(writing)
    writing.mkdir()
    mine.enter_context(_locked(writing))
    made = writing.stat()
    mine.callback(lambda: _remove(writing, made))


def _remove(folder: Path, made: os.stat_result) -> None:
    """Remove a folder, unless it has gone and another one has its name."""
    with suppress(OSError):
        if os.path.samestat(folder.stat(), made):
            shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> None:
    """A folder with its parents, on the disk."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """For this process alone, where the file system can tell.

    Raises:
        OSError: if it is another's.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                "another process is writing it at this moment; give each run a path of its own"
            ) from None
        except OSError:  # such as some network file systems
            pass
        yield
    finally:
        with suppress(OSError):  # a forked child may have the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _check_free(target: Path) -> None:
    if target.exists() and not (target / STATE).exists() and (not target.is_dir() or any(target.iterdir())):
        raise OSError(f"{target} is there and is no checkpoint: remove it or choose another path")


def _finish(
    writing: Path, target: Path, deals: list[Deal], state: dict[str, Any], scheduler: dict[str, Any] | None
) -> None:
    """Write what is small, bring the folder to the disk and give it its name."""
    for deal in deals:
        deal.write_index(writing)
    if scheduler is not None:
        torch.save(scheduler, writing / SCHEDULER)
    for small in writing.iterdir():
        if small.suffix != ".safetensors":  # their writers have done it
            _sync(small)
    with (writing / STATE).open("w") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(writing)
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        _check_free(target)
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    writing.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)  # the new one is complete, whatever becomes of this


def _sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _attempt(action: Callable[[], None]) -> Exception | None:
    """What an action without communication raised, if it did: the ranks have to hear of it first."""
    try:
        action()
    except Exception as error:
        return error
    return None
