"""Checkpoints: a folder with whole tensors, whatever the mesh, so that any other spec can load it.

::

    model.safetensors       the model's state dict (float32 masters under bf16 and fp16), tied tensors once
    optimizer.safetensors   the optimizer's tensors, "parameter name/state name", whole like the parameter
    scheduler.pt            the learning-rate scheduler, if there is one
    extra_state.pt          extra state of modules (get_extra_state) that is not plain data; what is, is in state.json
    state.json              everything else, and each file's size and checksum; its presence says that the folder is complete

A large file is split into several, with an index (:mod:`meshfold.checkpoint.tensors.file_set`): each rank is assigned
tensors and writes them while the others gather the next. Apart from its own blocks, a rank holds at most two whole tensors: one
being written and one being gathered. The checkpoint is put in its place once all ranks have written it to disk. Until then an
older checkpoint there is kept (:mod:`meshfold.checkpoint.folder.replacement`). Every rank reads, through a memory map, the
parts of the files that are its own. So all ranks must see the folder.

A save in the background (:mod:`meshfold.engine.checkpoints.saving`) has the same tensors in rectangles, as each rank
keeps them (:mod:`meshfold.checkpoint.tensors.shard_files`); readers see no difference. ``torch.distributed.checkpoint`` is not
used for three reasons. Its shards are DTensors or ShardedTensors, which cannot describe a flat run of a fused and padded block.
It plans by collectives, which could mix with the training's. Its metadata is a pickle. docs/checkpoints.md has the few lines
from one to the other.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.files import read_torch_file
from meshfold.checkpoint.folder import (
    EXTRA_STATE_FILE,
    SCHEDULER_FILE,
    STATE_FILE,
    begin_checkpoint,
    commit_checkpoint,
    current_path,
    error_of,
    resolve_folder,
    saved_folder,
    set_aside_path,
    with_advice,
    writing_path,
)
from meshfold.checkpoint.state import CHECKSUMS, FILES, FORMAT_WHOLE, file_checksum, parse_state
from meshfold.checkpoint.tensors import (
    BackgroundWriter,
    FileAssignment,
    TensorFolder,
    TensorInfo,
    open_tensors,
    verify_checksums,
    writing_order,
)
from meshfold.engine.states.protocols import Source
from meshfold.engine.world import World, agree, fail_together

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"

_ELSEWHERE = "Copy the checkpoint from its source again, or resume from an earlier one"


def write_checkpoint(
    path: str | os.PathLike[str],
    world: World,
    files: dict[str, dict[str, Source]],
    state: dict[str, Any],
    small: Mapping[str, Any],
    *,
    all_read: bool,
) -> None:
    """Write a checkpoint. All ranks must call; all of them raise if one could not write.

    Args:
        path: the folder; made with its parents, or replaced.
        world: where the tensors lie.
        files: file name to its tensors, the same on every rank.
        state: the content of ``state.json``.
        small: name of a separate file to its content, written by ``torch.save``; rank 0's counts.
        all_read: every rank has a part of the tensors; else each data coordinate has all of them.

    Raises:
        CheckpointError: if the folder could not be written. An existing checkpoint is then unchanged.
    """
    target = resolve_folder(path)
    what, first = f"cannot write the checkpoint {target}", world.mesh.rank == 0
    assignments = [_assign(name, sources, world) for name, sources in files.items()]
    with ExitStack() as mine:  # on the first rank: holds the folder while it is written
        names = [*small, *(name for assignment in assignments for name in assignment.files)]
        writing = begin_together(target, mine, names, world, what)
        error: Exception | None = None
        for assignment, sources in zip(assignments, files.values(), strict=True):
            error = _write_tensors(writing, assignment, sources, world, all_read=all_read, error=error)
        fail_together(world, with_advice(error), what)
        error = None
        if first:
            error = error_of(lambda: _finish(writing, target, assignments, {"format": FORMAT_WHOLE, **state}, small))
        fail_together(world, with_advice(error), what)


def begin_together(target: Path, mine: ExitStack, files: Sequence[str], world: World, what: str) -> Path:
    """Let the first rank start a folder (:func:`meshfold.checkpoint.folder.begin_checkpoint`); all ranks must call.

    Returns:
        The folder that is written, on every rank.
    """
    made: list[Path] = []
    error = None
    if world.mesh.rank == 0:
        error = error_of(lambda: made.append(begin_checkpoint(target, mine, files)))
    fail_together(world, with_advice(error), what)
    return writing_path(target, inside=bool(agree(world, int(bool(made) and made[0].parent == target))))


def _finish(
    writing: Path,
    target: Path,
    assignments: list[FileAssignment],
    state: dict[str, Any],
    small_files: Mapping[str, Any],
) -> None:
    for assignment in assignments:
        assignment.write_index(writing)
    commit_checkpoint(writing, target, state, small_files)


def _assign(name: str, sources: dict[str, Source], world: World) -> FileAssignment:
    announced = {key: TensorInfo(dtype=source.dtype, shape=source.shape) for key, source in sources.items()}
    differ = [key for key, source in sources.items() if not source.alike]
    return FileAssignment.make(name, announced, world.mesh.world_size, differ)


def _write_tensors(
    folder: Path,
    assignment: FileAssignment,
    sources: dict[str, Source],
    world: World,
    *,
    all_read: bool,
    error: Exception | None,
) -> Exception | None:
    """Gather each tensor once among the ranks that share it, and write it on one of them. Return this rank's error, if any."""
    rank, members = world.mesh.rank, world.members
    writer: BackgroundWriter | None = None
    if rank in assignment.writers and error is None:
        try:
            writer = BackgroundWriter(folder / assignment.file_of(rank), assignment.share(rank))
        except Exception as refused:
            error = refused
    for name in writing_order(assignment.announced):
        chosen = assignment.writer_of[name]
        if not all_read and chosen not in members:
            continue
        try:
            whole = sources[name].read()  # collective: take part even after an error
        except Exception as unread:
            error = error or unread
            continue
        if writer is not None and chosen == rank and error is None:
            error = error_of(partial(writer.write, name, whole))
        del whole
    if writer is not None:
        found = error_of(partial(writer.close, complete=error is None))
        error = error or found
    return error


class Checkpoint:
    """A checkpoint on disk, open for reading.

    Attributes:
        path: the folder that is read.
        state: what ``state.json`` says.
        mark: CRC-32 of ``state.json``, by which ranks check that they read the same checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises:
        CheckpointError: if there is none, or it was written by a newer version.
        """
        target = resolve_folder(path)
        # Earlier versions moved the old checkpoint aside for an instant, and may have been killed then.
        old = set_aside_path(target)
        self.path = old if not (target / STATE_FILE).exists() and (old / STATE_FILE).exists() else target
        if not (self.path / STATE_FILE).exists():
            raise CheckpointError(f"cannot load {target}: it {_what_it_is(target)}")
        try:
            text = (self.path / STATE_FILE).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path / STATE_FILE}: {error}") from error
        self.state: dict[str, Any] = parse_state(text, self.path / STATE_FILE)
        self.mark = zlib.crc32(text)
        self._files: dict[str, int] = self.state[FILES]
        self._saved = saved_folder(self.path, self.state)
        sums = self.state.get(CHECKSUMS, {})
        for name, size in self._files.items():
            self._check(name, size, sums.get(name))

    def path_of(self, name: str) -> Path:
        """Return the current path of one of its files."""
        return current_path(self.path, self._saved, name)

    def _check(self, name: str, size: int, wanted: str | None) -> None:
        """Compare a file with the index: its size and its checksum (for tensors, the header's)."""
        path = self.path_of(name)
        try:
            found = path.stat().st_size
            path = path if found == size else self.path_of(name)  # it was renamed in the meantime
            found = path.stat().st_size
            told = file_checksum(path) if found == size and wanted is not None else wanted
        except OSError as error:
            self.check_still_there()
            raise CheckpointError(f"cannot read {path}: {error.strerror}. {_ELSEWHERE}") from error
        if found != size:
            self.check_still_there()
            raise CheckpointError(f"{path} is truncated or changed: it had {size} bytes and has {found}. {_ELSEWHERE}")
        if told != wanted:
            self.check_still_there()
            raise CheckpointError(
                f"{path} is damaged or another checkpoint's: its checksum is {told}, and was {wanted} when it was saved. "
                f"{_ELSEWHERE}"
            )

    def verify(self, part: int = 0, parts: int = 1, *, weights_only: bool = False) -> None:
        """Read every ``parts``-th tensor, from number ``part`` on, and compare it with its checksum.

        Raises:
            CheckpointError: for a tensor that differs from the one that was written.
        """
        verify_checksums(self.model, part, parts)
        if "optimizer" in self.state and not weights_only:
            verify_checksums(self.optimizer, part, parts)

    @property
    def model(self) -> Mapping[str, Tensor]:
        """The model's tensors, by name."""
        return self.tensors(MODEL_FILE)

    @property
    def optimizer(self) -> Mapping[str, Tensor]:
        """The optimizer's tensors, by ``parameter/state``."""
        return self.tensors(OPTIMIZER_FILE)

    def tensors(self, name: str) -> Mapping[str, Tensor]:
        """Return the tensors of a file, by name; opened files stay readable if the folder is replaced.

        Raises:
            CheckpointError: if they are damaged, or another checkpoint has replaced this one.
        """
        try:
            found = open_tensors(TensorFolder(self.path, self.path_of, self._files), name)
        finally:
            self.check_still_there()
        return found

    def check_still_there(self) -> None:
        """Check that everything read so far is of one checkpoint.

        Raises:
            CheckpointError: if another run has replaced it in the meantime.
        """
        try:
            now = zlib.crc32((self.path / STATE_FILE).read_bytes())
        except OSError:
            now = None
        if now != self.mark:
            raise CheckpointError(
                f"{self.path} was replaced while it was read: another process saves there. Load it again when that one has ended"
            )

    @property
    def scheduler(self) -> dict[str, Any] | None:
        """The scheduler's state, if it was saved."""
        found: dict[str, Any] | None = self.small_file(SCHEDULER_FILE)
        if found is not None and not isinstance(found, dict):
            raise CheckpointError(
                f"{self.path / SCHEDULER_FILE} holds a {type(found).__name__}, not a scheduler's state"
            )
        return found

    @property
    def extra_state(self) -> dict[str, Any]:
        """The extra state of modules, by its names in a state dict."""
        found = self.small_file(EXTRA_STATE_FILE) or {}
        if not isinstance(found, dict):
            raise CheckpointError(
                f"{self.path / EXTRA_STATE_FILE} holds a {type(found).__name__}, not extra state by name"
            )
        return {**self.state.get("extra_state", {}), **found}

    def small_file(self, name: str) -> Any:
        """Read a file written by ``torch.save``: tensors and plain Python values, never code. None if it is not listed.

        Raises:
            CheckpointError: if it is damaged, or holds something else.
        """
        if name not in self._files:
            return None
        try:
            return read_torch_file(self.path_of(name))
        finally:
            self.check_still_there()


def _what_it_is(path: Path) -> str:
    """Describe a path that is not a checkpoint, and name what can read it."""
    if (path / "config.json").exists():
        return "is a Hugging Face folder: Engine(pretrained(folder), ...) reads it, or meshfold convert"
    if path.is_dir():
        return "is no complete checkpoint: it has no state.json"
    if path.exists():
        return (
            "is a file, and a checkpoint is a folder; the state dict of a model, saved by torch, goes into "
            "engine.load_state_dict(torch.load(file))"
        )
    return "does not exist"
