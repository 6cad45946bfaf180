"""Background saving: a copy of this rank's state is made, and written, while the next steps run.

1. ``Saver.start``, on all ranks: the folder is made, each rank starts its own files, and records the tensors that it keeps.
   What may change in a forward (buffers) is copied on the device. State on a disk is written now.
2. In the background, on each rank, a little later (:data:`HEAD_START_S`) or when a caller waits: the rectangles that
   it writes are found (:mod:`meshfold.checkpoint.shards`) and copied to host memory
   (:mod:`meshfold.checkpoint.staging`), the copies are written, and a file is given its name when it is on the disk.
   No collective is called, since it could mix with the training's: ranks see each other's files in the shared folder.
3. In the background, on rank 0: when all files are there it checks that every element of every tensor is in one of them,
   writes the index and ``state.json``, and gives the folder its name.

Code that changes a tensor being copied calls ``Saver.before_change``: the optimizer's step, a load, moves of chunks. Forward
and backward do not, and run in parallel with the copies.

Until a checkpoint is complete, the one before stays the last. If a rank fails, its file says so. Nobody waits for a process
that is known to have ended. A rank whose file has not grown for ``PATIENCE`` seconds counts as dead. Then rank 0 removes the
folder, and all ranks raise the same error in their next step, save, load or close.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError, InUseError
from meshfold.checkpoint.folder import (
    commit_checkpoint,
    error_of,
    hold_lock,
    lock_path,
    remove_unfinished,
    resolve_folder,
    with_advice,
)
from meshfold.checkpoint.staging import BackgroundCopies, CopyQueue, copy_queue
from meshfold.checkpoint.tensors import TensorInfo, shard_file_name, shard_index_name, write_shard_index
from meshfold.engine.checkpoints.checkpoint import begin_together
from meshfold.engine.checkpoints.rank_file import FilePlan, RankFile
from meshfold.engine.states.protocols import Sources
from meshfold.engine.world import World, fail_together
from meshfold.mesh import all_reduce
from meshfold.mesh.processes import ended_ranks as ended_ranks

PATIENCE = 120.0
"""Seconds without any file growing, after which rank 0 gives a save up."""


class Saver:
    """Saves of an engine, one at a time; host memory for a copy of this rank's state is allocated once, and kept between saves."""

    def __init__(self, world: World) -> None:
        """Args:
        world: where the tensors lie.
        """
        self._world = world
        self._under_way: BackgroundSave | None = None
        self._buffers: dict[str, Tensor] = {}
        self._plans: dict[str, FilePlan] = {}  # by file
        self._lane: CopyQueue | None = None

    def start(
        self,
        path: str | os.PathLike[str],
        files: Mapping[str, Sources],
        state: dict[str, Any],
        small_files: Mapping[str, Any],
    ) -> BackgroundSave:
        """Start copying and writing. All ranks must call. Waits for an earlier save that is still running.

        Args:
            path: the folder; made with its parents, or replaced.
            files: file name to its tensors, the same on every rank.
            state: the content of ``state.json``.
            small_files: name of a separate file to its content, written by ``torch.save``.

        Raises:
            CheckpointError: on all ranks, if the earlier save has failed, or this one cannot start on one of them.
        """
        self._settle()
        target = resolve_folder(path)
        save = BackgroundSave(target, self._world)
        first = self._world.mesh.rank == 0
        what = f"cannot write the checkpoint {target}"
        small = json.loads(json.dumps(state)), copy.deepcopy(dict(small_files))  # snapshots
        names = [*files]
        size = self._world.mesh.world_size
        written = [shard_file_name(name, rank, size) for name in names for rank in range(size)]
        written += [*map(shard_index_name, names), *small_files]
        mine = ExitStack()  # on the first rank: holds the folder while it is written
        made: list[RankFile] = []
        try:
            writing = begin_together(target, mine, written, self._world, what)
            error = error_of(lambda: made.extend(self._begun(writing, files)))
            fail_together(self._world, with_advice(error), what)
        except BaseException:
            for file in made:
                file.abandon()
            mine.close()
            raise
        # From here on this rank does not wait for its GPU: the copies may take as long as a step.
        self._lane = self._lane or copy_queue(self._world.device)
        save.writing, save.copying = writing, BackgroundCopies(self._lane)

        def work() -> None:
            with mine:
                self._copy(made, save)
                self._write(made)
                if first:
                    tensors = {name: file.described for name, file in zip(names, made, strict=True)}
                    _complete(writing, target, tensors, *small, ranks=self._world.mesh.world_size)

        save.begin(work)
        self._under_way = save
        return save

    def look(self) -> None:
        """Raise on all ranks, between steps, if a save has failed. All must call; it costs an all-reduce while one is running."""
        save = self._under_way
        if save is None:
            return
        ended = int(save.done)
        if self._world.mesh.world_size > 1:
            told = torch.tensor(ended, device=self._world.device)
            ended = int(all_reduce(told, self._world.everyone, "min"))
        if ended:
            self._settle()

    def finish(self) -> None:
        """Wait for the running save, if there is one, and release the memory of copies. All ranks must call.

        Raises:
            CheckpointError: on all ranks, if it has failed and that was not raised before.
        """
        try:
            self._settle()
        finally:
            self._buffers.clear()

    def abandon(self) -> None:
        """Finish for this rank only, if others may not call :meth:`finish`: an error is reported at the end of the process."""
        save, self._under_way = self._under_way, None
        if save is not None:
            save.join()
        self._buffers.clear()

    def before_change(self) -> None:
        """Order later work after the copies; call it before changing the copied tensors."""
        save = self._under_way
        if save is not None:
            save.wait_until_copied()

    # -- within -------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        save, self._under_way = self._under_way, None
        if save is not None:
            save.wait()

    def _begun(self, folder: Path, files: Mapping[str, Sources]) -> Iterator[RankFile]:
        for name, sources in files.items():
            file = RankFile(folder, name, sources, self._world)
            yield file
            if file.has_some_on_disk:  # training will read and write these files
                self._lay_out(file)

    def _lay_out(self, file: RankFile) -> None:
        name = file.path.name
        self._plans[name] = file.lay_out(self._plans.get(name))

    def _copy(self, files: list[RankFile], save: BackgroundSave) -> None:
        """Copy everything that is not on disk to host memory; a file that cannot be started records its error."""
        copying, device = save.copying, self._world.device
        assert copying is not None  # made when the save began
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                for file in files:
                    self._lay_out(file)
                save.bytes = sum(file.bytes for file in files)
                copying.run(pair for file in files for pair in file.copies(self._buffer))
                save.note_copied()
                for file in files:
                    file.drop_sources()
            except Exception as error:
                for file in files:
                    file.give_up(with_advice(error) or error)
                raise
            finally:
                copying.over()

    def _buffer(self, key: str, like: Tensor) -> Tensor:
        """Return host memory for a copy; later saves reuse it."""
        buffer = self._buffers.get(key)
        fits = buffer is not None and (buffer.shape, buffer.dtype) == (like.shape, like.dtype)
        if buffer is None or not fits or (like.is_cuda and not buffer.is_pinned()):
            buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
            self._buffers[key] = buffer
        return buffer

    def _write(self, files: list[RankFile]) -> None:
        """Write the copies; a file that cannot be written records its error."""
        for number, file in enumerate(files):
            try:
                file.write()
            except Exception as error:
                for rest in files[number:]:
                    rest.give_up(with_advice(error) or error)
                raise


def _complete(
    writing: Path,
    target: Path,
    files: Mapping[str, Mapping[str, TensorInfo]],
    state: dict[str, Any],
    small_files: Mapping[str, Any],
    *,
    ranks: int,
) -> None:
    """Wait for the files of all ranks and complete the checkpoint, on rank 0."""
    wanted = [(rank, writing / shard_file_name(name, rank, ranks)) for name in files for rank in range(ranks)]
    size, since, pause = -1, time.monotonic(), 0.005
    while missing := [(rank, path) for rank, path in wanted if not path.exists()]:
        for rank, path in missing:
            failed = path.with_name(f"{path.name}.failed")
            if failed.exists():
                raise CheckpointError(f"rank {rank}: {failed.read_text() or 'it could not write its part'}")
        gone = ended_ranks(rank for rank, _ in missing)
        if any(rank in gone and not path.exists() for rank, path in missing):
            raise CheckpointError(
                f"rank {gone[0]} exited before it had written its part. Resume from the previous checkpoint"
            )
        now = sum(_size(path) for path in writing.iterdir())
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            rank, path = missing[0]
            raise CheckpointError(
                f"rank {rank} has not written to {path} for {PATIENCE:.0f} s: it has died, or does not see the folder. "
                "Use a folder that all ranks see, and resume from the previous checkpoint"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    for name, tensors in files.items():
        write_shard_index(writing, name, tensors, ranks)
    commit_checkpoint(writing, target, state, small_files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # renamed in the meantime
        return 0


HEAD_START_S = 0.01
"""How long the thread leaves the interpreter to the training, unless somebody waits for it. A GPU has nothing to do when ``save``
returns, if its last step ended with reading the loss: every launch that the thread's Python holds up then is time that the GPU
stands idle. Some milliseconds later there are kernels queued before it that hide this."""


class BackgroundSave:
    """A save that runs in the background.

    Attributes:
        path: of the checkpoint.
        writing: the folder that is written, once it has started.
        blocked_seconds: time that ``save`` blocked this rank.
        copied_seconds: time from its start until all was copied; 0.0 until then.
        seconds: total time; 0.0 until it is done.
        bytes: written by this rank; 0 until known.
        copying: protects the copied tensors from changes; None before it has started.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.writing, self._world = path, path, world
        self.blocked_seconds = self.copied_seconds = self.seconds = 0.0
        self.bytes = 0
        self._begun = time.perf_counter()
        self._error: Exception | None = None
        self._told = False
        self._awaited = threading.Event()  # set while a caller waits for the thread
        self._thread: threading.Thread | None = None
        self.copying: BackgroundCopies | None = None

    @property
    def done(self) -> bool:
        """True if this rank's part is finished. On rank 0: the save is complete, or has failed."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def error(self) -> Exception | None:
        """The error on this rank so far. On rank 0: on any rank."""
        return self._error

    def wait(self) -> None:
        """Wait until the checkpoint is complete. All ranks must call.

        Raises:
            CheckpointError: on all ranks, the same, if any of them could not write; once.
        """
        self.join()
        if not self._told:
            self._told = True
            atexit.unregister(self._tell)
            mine = self._error if self._world.mesh.rank == 0 else None  # rank 0 collects all errors
            what = f"cannot write the checkpoint {self.path} in the background"
            try:
                fail_together(self._world, mine, what, name_rank=False)
            except CheckpointError:
                if self._world.mesh.rank == 0:
                    # Other ranks still wrote their files when the folder was removed; none does now.
                    inside = self.writing.parent == self.path
                    with (
                        suppress(OSError, InUseError),
                        hold_lock(lock_path(self.path, inside=inside), doing="saving into it"),
                    ):
                        remove_unfinished(self.writing)
                raise

    def wait_until_copied(self) -> None:
        """Wait until the saved tensors may be changed. The engine calls it before it steps or loads.

        Code that changes parameters or the optimizer's state in another way during a save must call it before; on a GPU, on
        the stream of the change.
        """
        self._awaited.set()
        if self.copying is not None:
            self.copying.hold()

    def note_copied(self) -> None:
        """Record that the thread has copied everything."""
        self.copied_seconds = time.perf_counter() - self._begun

    def join(self) -> None:
        """Wait until this rank's part is done."""
        self._awaited.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, work: Callable[[], None]) -> None:
        """Run the work in a thread that the interpreter waits for at exit: a little later, or when a caller waits."""

        def keep() -> None:
            self._awaited.wait(HEAD_START_S)
            self._error = with_advice(error_of(work))
            self.seconds = time.perf_counter() - self._begun

        self._thread = threading.Thread(target=keep, name=f"save {self.path.name}")
        self._thread.start()  # not a daemon: the interpreter waits for it at exit
        self.blocked_seconds = time.perf_counter() - self._begun
        atexit.register(self._tell)

    def _tell(self) -> None:
        """Report an error at exit if the process never asked for it."""
        if self._error is not None and not self._told:
            print(f"meshfold: the checkpoint {self.path} was not completed: {self._error}", file=sys.stderr)
