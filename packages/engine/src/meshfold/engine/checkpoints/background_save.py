"""A save that goes on beside the training: whether it is done, what failed, and waiting for it."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from meshfold.checkpoint import CheckpointError, InUseError
from meshfold.checkpoint.folder import error_of, hold_lock, lock_path, remove_unfinished, with_advice
from meshfold.checkpoint.staging import BackgroundCopies
from meshfold.engine.world.world import World, fail_together

HEAD_START_S = 0.01
"""How long the thread leaves the interpreter to the training, unless somebody waits for it. A GPU has nothing to do when ``save``
returns, if its last step ended with reading the loss: every launch that the thread's Python holds up then is time that the GPU
stands idle. Some milliseconds later there are kernels queued before it that hide this."""


class BackgroundSave:
    """A save that goes on beside the training.

    Attributes:
        path: of the checkpoint.
        writing: the folder that is written, when it has begun.
        blocked_seconds: how long ``save`` held this rank up.
        copied_seconds: how long it took until all was copied, from its beginning on; 0.0 until it is.
        seconds: how long it took in all; 0.0 until it is done.
        bytes: that this rank writes; 0 until it is known.
        copying: keeps what is copied from being changed; None before it has begun.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.writing, self._world = path, path, world
        self.blocked_seconds = self.copied_seconds = self.seconds = 0.0
        self.bytes = 0
        self._begun = time.perf_counter()
        self._error: Exception | None = None
        self._told = False
        self._awaited = threading.Event()  # somebody waits for the thread
        self._thread: threading.Thread | None = None
        self.copying: BackgroundCopies | None = None

    @property
    def done(self) -> bool:
        """Tell whether this rank's part is finished. On rank 0: the save is complete, or has failed."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def error(self) -> Exception | None:
        """The error on this rank so far. On rank 0: on any rank."""
        return self._error

    def wait(self) -> None:
        """Return when the checkpoint is complete. All ranks must call.

        Raises:
            CheckpointError: on all ranks, the same, if any of them could not write; once.
        """
        self.join()
        if not self._told:
            self._told = True
            atexit.unregister(self._tell)
            mine = self._error if self._world.mesh.rank == 0 else None  # who has heard of all
            what = f"cannot write the checkpoint {self.path} in the background"
            try:
                fail_together(self._world, mine, what, name_rank=False)
            except CheckpointError:
                if self._world.mesh.rank == 0:
                    # Others were at their files while the folder was removed; no one is now.
                    inside = self.writing.parent == self.path
                    with (
                        suppress(OSError, InUseError),
                        hold_lock(lock_path(self.path, inside=inside), doing="saving into it"),
                    ):
                        remove_unfinished(self.writing)
                raise

    def wait_until_copied(self) -> None:
        """Return when what was saved may be changed. The engine does so before it steps or loads.

        Who changes parameters or the optimizer's state in another way, while a save is under way, calls it before; on a GPU on
        the stream that does it.
        """
        self._awaited.set()
        if self.copying is not None:
            self.copying.hold()

    def note_copied(self) -> None:
        """Its thread has copied everything."""
        self.copied_seconds = time.perf_counter() - self._begun

    def join(self) -> None:
        """Return when this rank has nothing more to do for it."""
        self._awaited.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, work: Callable[[], None]) -> None:
        """Do the work in a thread, which the interpreter waits for at its end: a little later, or when somebody waits."""

        def keep() -> None:
            self._awaited.wait(HEAD_START_S)
            self._error = with_advice(error_of(work))
            self.seconds = time.perf_counter() - self._begun

        self._thread = threading.Thread(target=keep, name=f"save {self.path.name}")
        self._thread.start()  # waits for the thread, which would go on to work for as long as the interpreter lets it
        self.blocked_seconds = time.perf_counter() - self._begun
        atexit.register(self._tell)

    def _tell(self) -> None:
        """At the end of a process in which nobody asked."""
        if self._error is not None and not self._told:
            print(f"meshfold: the checkpoint {self.path} was not completed: {self._error}", file=sys.stderr)
