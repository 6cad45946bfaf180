"""One run at a time in a folder: the lock that rank 0 holds from its engine's start to the end of the run."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from meshfold.checkpoint import CheckpointError, InUseError
from meshfold.checkpoint.folder import hold_lock, is_locked
from meshfold.engine.world import World, fail_together
from meshfold.mesh import MeshfoldError
from meshfold.train.settings import TrainSettings

LOCK = ".run.lock"
_DOING = "training into it"
_LOOKED_AT_S = 1.0  # somebody who looks whether the lock is held holds it for an instant


def check_free(out: str) -> None:
    """Raise what :func:`hold_folder` would, if another run is writing there now."""
    lock = Path(out) / LOCK
    if is_locked(lock):
        with hold_lock(lock, doing=_DOING):
            pass


def hold_folder(settings: TrainSettings, world: World) -> ExitStack:
    """Take the run's folder for rank 0, until what is returned is closed; all ranks must call.

    Raises:
        CheckpointError: on all ranks, if another run is writing there, or has finished there since this one began.
    """
    held = ExitStack()
    error: Exception | None = None
    if world.mesh.rank == 0:
        out = Path(settings.out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            _take(held, out / LOCK)
            there = settings.checkpoints.there()
            if there and not settings.resume:
                raise CheckpointError(f"another run has finished there since: {there[0]}")
        except (MeshfoldError, OSError) as found:
            held.close()
            error = found
    fail_together(world, error, f"--out {settings.out!r}", name_rank=False)
    return held


def _take(held: ExitStack, lock: Path) -> None:
    deadline = time.monotonic() + _LOOKED_AT_S
    while True:
        try:
            held.enter_context(hold_lock(lock, doing=_DOING))
            return
        except InUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOKED_AT_S / 10)
