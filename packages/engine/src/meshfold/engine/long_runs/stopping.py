"""Stopping on request: every rank ends the same step, although a signal comes to each at its own time, or to one alone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

import torch

from meshfold.engine.long_runs.second_request import SecondRequest
from meshfold.engine.world.world import World
from meshfold.mesh import Pending, all_reduce
from meshfold.mesh.processes import STOPPED_CODE

__all__ = ["STOPPED_CODE", "GracefulStop"]

#: What batch systems send before they end a job: Slurm SIGTERM, and the one of ``--signal=USR1@120``.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _OnRanks(Protocol):
    @property
    def world(self) -> World: ...


class GracefulStop:
    """Catches requests to stop, and lets all ranks see them after the same step.

    >>> with GracefulStop(engine) as stop:                        # doctest: +SKIP
    ...     for batch in loader:
    ...         engine.train_step(batch)
    ...         if stop.now():
    ...             engine.save("checkpoint")
    ...             break

    The agreement is the largest of a flag over all ranks, which travels while the next step computes: a request ends the
    run two steps later at most. The same request a second time ends the process at once
    (:mod:`meshfold.engine.long_runs.second_request`).

    Attributes:
        asked: this process has caught a request.
    """

    def __init__(self, engine: _OnRanks, signals: Sequence[int] = SIGNALS) -> None:
        """``engine``: whose ranks must agree; all must make one."""
        self._world, self._signals = engine.world, tuple(signals)
        self._before: dict[int, Any] = {}
        self._flag: Pending | None = None
        self._impatience: SecondRequest | None = None
        self.asked = False

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():  # only there Python can catch signals
            for number in self._signals:
                if (
                    signal.getsignal(number) is not None
                ):  # else C code catches it, to which it could not be given back
                    self._before[number] = signal.signal(number, self._catch)
            if self._before:
                self._impatience = SecondRequest(self._before, says=self._world.mesh.rank == 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        flag, self._flag = self._flag, None
        if flag is not None and kind is None:
            flag.wait()  # the others have sent theirs
        if self._impatience is not None:
            self._impatience.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def now(self) -> bool:
        """Return whether to stop here; all ranks must call after each step, and get the same answer."""
        if self._world.mesh.world_size == 1:
            return self.asked
        asked = self._flag is not None and bool(self._flag.wait())
        flag = torch.tensor(int(self.asked), dtype=torch.int32, device=self._world.device)
        self._flag = all_reduce(flag, self._world.everyone, "max", async_op=True)
        return asked
