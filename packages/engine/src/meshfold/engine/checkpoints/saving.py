"""Saving beside the training: a copy of what this rank keeps is made at once, and written while the next steps run.

1. ``Saver.start``, on all ranks: the folder is made, each rank begins files of its own, and copies the rectangles that it
   writes (:mod:`meshfold.engine.checkpoints.rectangles`) to host memory. What lives on a disk, for want of memory, is written now.
2. In the background, on each rank: the copies are written, and a file is given its name when it is on the disk. There is no
   collective in this, which could meet those of the training: ranks see each other's files in the folder that all can see.
3. In the background, on rank 0: when all files are there it looks whether every element of every tensor is in one of them,
   writes the index and ``state.json``, and gives the folder its name.

Until then the checkpoint before is the last one. If a rank fails, its file says so; if a file has not grown for
``PATIENCE`` seconds its rank is taken for dead. Then rank 0 removes the folder, and all ranks raise the same error in their next
step, save, load or close. On a GPU the copy is made by a stream of its own; kernels that change what is copied wait for it.
"""

from __future__ import annotations

import copy
import json
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.engine.checkpoints.background_save import BackgroundSave
from meshfold.engine.checkpoints.block_files import file_of, key_of, write_index
from meshfold.engine.checkpoints.place import SCHEDULER, advised, attempt, begin, finish, place_of, writing_of
from meshfold.engine.checkpoints.rectangles import Piece, Share
from meshfold.engine.checkpoints.tensor_file import Described, TensorWriter
from meshfold.engine.errors import CheckpointError
from meshfold.engine.states import Source
from meshfold.engine.together import fail_together
from meshfold.engine.world import World
from meshfold.mesh import all_reduce

PATIENCE = 120.0
"""Seconds without any file growing, after which rank 0 gives a save up."""


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A rectangle on its way to a file.

    Attributes:
        key: its name there.
        described: what it is.
        share: of which it is a piece.
        piece: which one.
        settled: it does not change before a step, as buffers may in a forward.
    """

    key: str
    described: Described
    share: Share
    piece: Piece
    settled: bool


class _File:
    """A file of this rank: what goes into it, and its writer."""

    def __init__(self, folder: Path, name: str, sources: dict[str, Source], world: World) -> None:
        rank, size = world.mesh.rank, world.mesh.world_size
        self.path = folder / file_of(name, rank, size)
        self.part = self.path.with_name(f"{self.path.name}.part")
        self.rectangles: list[_Written] = []
        for tensor, source in sources.items():
            share = source.share(tensor)
            for piece in share.pieces:
                described = Described(dtype=source.dtype, shape=piece.sizes)
                key = key_of(tensor, piece.offsets, piece.sizes)
                one = _Written(key=key, described=described, share=share, piece=piece, settled=source.alike)
                self.rectangles.append(one)
        # What is on a disk is written first. Wide dtypes first, so that each begins at a multiple of its elements.
        self.rectangles.sort(key=lambda one: (not one.share.on_disk, -one.described.dtype.itemsize))
        announced = {one.key: one.described for one in self.rectangles}
        self.writer = TensorWriter(self.part, announced, order=[*announced])

    def rename(self) -> None:
        self.writer.close()
        self.part.rename(self.path)

    def give_up(self, error: Exception) -> None:
        """Let rank 0 know, in the place of what was written: that room is there."""
        self.writer.abandon()
        with suppress(OSError):
            self.part.write_text(str(error))
        with suppress(OSError):
            self.part.rename(self.path.with_name(f"{self.path.name}.failed"))


class Saver:
    """Saves of an engine, one at a time; host memory for a copy of what this rank keeps is taken once, and kept."""

    def __init__(self, world: World) -> None:
        """Args:
        world: where the tensors lie.
        """
        self._world = world
        self._under_way: BackgroundSave | None = None
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def start(
        self,
        path: str | os.PathLike[str],
        files: dict[str, dict[str, Source]],
        state: dict[str, Any],
        scheduler: dict[str, Any] | None,
    ) -> BackgroundSave:
        """Copy, and begin to write. All ranks must call. Waits for a save before that is still under way.

        Args:
            path: the folder; made with its parents, or replaced.
            files: file name to its tensors, alike on every rank.
            state: what goes into ``state.json``.
            scheduler: the scheduler's state, if any.

        Raises:
            CheckpointError: on all ranks, if the save before has failed, or this one cannot begin on one of them.
        """
        self.finish()
        target = place_of(path)
        save = BackgroundSave(target, self._world)
        writing, first = writing_of(target), self._world.mesh.rank == 0
        what = f"cannot write the checkpoint {target}"
        small = json.loads(json.dumps(state)), copy.deepcopy(scheduler)  # as they are now
        mine = ExitStack()  # of the first rank: the folder, while it is written
        made: list[_File] = []
        try:
            error = attempt(lambda: begin(writing, target, mine)) if first else None
            fail_together(self._world, advised(error), what)
            error = attempt(lambda: made.extend(self._begun(writing, files)))
            error = error or attempt(lambda: self._copy(made, save))
            fail_together(self._world, advised(error), what)
        except BaseException:
            for file in made:
                file.writer.abandon()
            mine.close()
            raise

        def work() -> None:
            with mine:
                self._write(made, save)
                if first:
                    tensors = {name: _described(sources) for name, sources in files.items()}
                    _complete(writing, target, tensors, *small, ranks=self._world.mesh.world_size)

        save.begin(work)
        self._under_way = save
        return save

    def look(self) -> None:
        """Between steps: raise on all ranks if a save has failed. All must call; it costs an all-reduce while one is under way."""
        save = self._under_way
        if save is None:
            return
        ended = torch.tensor(int(save.done), device=self._world.device)
        if int(all_reduce(ended, self._world.everyone, "min")):
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way, if there is one. All ranks must call.

        Raises:
            CheckpointError: on all ranks, if it has failed and nobody was told yet.
        """
        save, self._under_way = self._under_way, None
        if save is not None:
            save.wait()

    def abandon(self) -> None:
        """Wait for this rank's part alone, where others may not come: an error is told at the end of the process."""
        save, self._under_way = self._under_way, None
        if save is not None:
            save.join()

    def before_change(self) -> None:
        """Before what was copied changes: let the device's kernels wait until a stream has copied it."""
        save = self._under_way
        if save is not None and save.copied is not None:
            torch.cuda.current_stream(self._world.device).wait_event(save.copied)

    # -- within -------------------------------------------------------------------------------------------------

    def _begun(self, folder: Path, files: dict[str, dict[str, Source]]) -> list[_File]:
        return [_File(folder, name, sources, self._world) for name, sources in files.items()]

    @torch.no_grad()
    def _copy(self, files: list[_File], save: BackgroundSave) -> None:
        """Copy to host memory what is in memory, and write what is on a disk."""
        device = self._world.device
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        for file in files:
            kept: tuple[Share, Tensor] | None = None
            for one in file.rectangles:
                if kept is None or kept[0] is not one.share:
                    kept = one.share, one.share.read()
                value = one.piece.view(kept[1])
                save.bytes += one.described.bytes
                if one.share.on_disk:
                    file.writer.write(one.key, value)
                else:
                    self._keep(f"{file.path.name}/{one.key}", value, settled=one.settled)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
            save.copied = torch.cuda.Event()
            save.copied.record(self._stream)

    def _keep(self, key: str, value: Tensor, *, settled: bool) -> None:
        on_gpu = value.device.type == "cuda"
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=on_gpu)
            self._buffers[key] = buffer
        if not on_gpu or not settled:  # in the order of what comes before and after
            buffer.copy_(value, non_blocking=on_gpu)
            return
        with torch.cuda.stream(self._stream):
            buffer.copy_(value, non_blocking=True)
        value.record_stream(self._stream)  # type: ignore[arg-type]

    def _write(self, files: list[_File], save: BackgroundSave) -> None:
        """Write the copies; a file that cannot be written says so."""
        if save.copied is not None:
            save.copied.synchronize()
        for number, file in enumerate(files):
            try:
                for one in file.rectangles:
                    if not one.share.on_disk:
                        file.writer.write(one.key, self._buffers[f"{file.path.name}/{one.key}"])
                file.rename()
            except Exception as error:
                for rest in files[number:]:
                    rest.give_up(advised(error) or error)
                raise


def _described(sources: dict[str, Source]) -> dict[str, Described]:
    return {name: Described(dtype=source.dtype, shape=source.shape) for name, source in sources.items()}


def _complete(
    writing: Path,
    target: Path,
    files: dict[str, dict[str, Described]],
    state: dict[str, Any],
    scheduler: dict[str, Any] | None,
    *,
    ranks: int,
) -> None:
    """On rank 0: wait for the files of all, and make a checkpoint of them."""
    wanted = [(rank, writing / file_of(name, rank, ranks)) for name in files for rank in range(ranks)]
    size, since, pause = -1, time.monotonic(), 0.005
    while missing := [(rank, path) for rank, path in wanted if not path.exists()]:
        for rank, path in missing:
            failed = path.with_name(f"{path.name}.failed")
            if failed.exists():
                raise CheckpointError(f"rank {rank}: {failed.read_text() or 'it could not write its part'}")
        now = sum(_size(path) for path in writing.iterdir())
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            rank, path = missing[0]
            raise CheckpointError(
                f"rank {rank} has written nothing more of {path} for {PATIENCE:.0f} s: it has died, or does not see the folder. "
                "Let all ranks see it, and go on from the checkpoint before"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    for name, tensors in files.items():
        write_index(writing, name, tensors, ranks)
    finish(writing, target, state, {} if scheduler is None else {SCHEDULER: scheduler})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # renamed since
        return 0
