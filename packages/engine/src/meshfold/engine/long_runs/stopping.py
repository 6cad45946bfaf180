"""Stopping on request, and resuming on another number of ranks.

All ranks stop after the same step, although a signal reaches each at a different time, or only one.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any, Protocol

import torch

from meshfold.engine.world import World
from meshfold.mesh import ParallelSpec, Pending, SpecError, all_reduce
from meshfold.mesh.processes import STOPPED_CODE
from meshfold.mesh.spec import format_value

__all__ = ["STOPPED_CODE", "GracefulStop"]


#: What batch systems send before they end a job: Slurm SIGTERM, and the one of ``--signal=USR1@120``.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _OnRanks(Protocol):
    @property
    def world(self) -> World: ...


class GracefulStop:
    """Catches requests to stop, and shows them to all ranks after the same step.

    >>> with GracefulStop(engine) as stop:                        # doctest: +SKIP
    ...     for batch in loader:
    ...         engine.train_step(batch)
    ...         if stop.now():
    ...             engine.save("checkpoint")
    ...             break

    Ranks agree by the maximum of a flag, which is reduced while the next step computes. So a request ends the run at most two
    steps later. The same request a second time ends the process at once (:class:`SecondRequest`).

    Attributes:
        asked: this process has caught a request.
    """

    def __init__(self, engine: _OnRanks) -> None:
        """``engine``: whose ranks must agree; all must make one."""
        self._world = engine.world
        self._before: dict[int, Any] = {}
        self._flag: Pending | None = None
        self._impatience: SecondRequest | None = None
        self.asked = False

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():  # Python handles signals only there
            for number in SIGNALS:
                if signal.getsignal(number) is not None:  # None: a C handler, which could not be restored
                    self._before[number] = signal.signal(number, self._catch)
            if self._before:
                self._impatience = SecondRequest(self._before, says=self._world.mesh.rank == 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        flag, self._flag = self._flag, None
        if flag is not None and kind is None:
            flag.wait()  # the other ranks have already sent theirs
        if self._impatience is not None:
            self._impatience.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def now(self) -> bool:
        """Return True if training should stop here; all ranks must call after each step, and get the same answer."""
        if self._world.mesh.world_size == 1:
            return self.asked
        asked = self._flag is not None and bool(self._flag.wait())
        flag = torch.tensor(int(self.asked), dtype=torch.int32, device=self._world.device)
        self._flag = all_reduce(flag, self._world.everyone, "max", async_op=True)
        return asked


SAME_S = 1.0
"""Of one request: a batch system may ask every process, and the launcher passes on what it is asked"""

_open: weakref.WeakSet[SecondRequest] = weakref.WeakSet()


class SecondRequest:
    """Ends the process at a second signal of the same number, at least :data:`SAME_S` seconds after the first.

    This works even while the main thread is in C code, where Python's handlers have to wait: Python writes the number of every
    signal into a pipe before it runs a handler, and a thread reads it. Create it in the main thread. If the process already has a
    wakeup descriptor for signals, as with asyncio, it does nothing.
    """

    def __init__(self, numbers: Collection[int], *, says: bool) -> None:
        """Args:
        numbers: the signals.
        says: whether the end is reported on standard error.
        """
        self._numbers, self._says = frozenset(numbers), says
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if self._before != -1:
            signal.set_wakeup_fd(self._before)
        _open.add(self)
        threading.Thread(target=self._wait, name="meshfold second request", daemon=True).start()

    def close(self) -> None:
        """Stop waiting; called by the main thread."""
        if self not in _open:
            return
        _open.discard(self)
        if self._before == -1:
            signal.set_wakeup_fd(-1)
        os.close(self._writer)  # ends the thread

    def _wait(self) -> None:
        first: dict[int, float] = {}
        while found := os.read(self._reader, 64):
            now = time.monotonic()
            for number in self._numbers.intersection(found):
                if now - first.setdefault(number, now) < SAME_S:
                    continue
                if self._says:
                    os.write(2, b"asked to stop a second time: ended at once, the last checkpoint stays\n")
                os._exit(128 + number)
        os.close(self._reader)

    def _leave_to_parent(self) -> None:
        """Stop handling signals in a forked child; its parent handles them."""
        if self._before == -1:
            signal.set_wakeup_fd(-1)
        os.close(self._writer)
        os.close(self._reader)


def _forget() -> None:
    for one in list(_open):
        one._leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_forget)


def resize_data_axis(parallel: Mapping[str, Any], world_size: int) -> tuple[dict[str, Any], str]:
    """Return the spec for another number of ranks: the axis ``data`` grows or shrinks, all else stays.

    The global batch stays the same, and so does the loss curve: only the distribution of its rows changes.

    Returns:
        The spec, and a sentence about the change; empty if nothing changed.

    Raises:
        SpecError: if the other axes do not divide the ranks.
    """
    spec = ParallelSpec.parse(dict(parallel))
    if "data" not in parallel or math.prod(spec.axes.values()) == world_size:
        return dict(parallel), ""
    before = int(parallel["data"])
    rest = math.prod(size for axis, size in spec.axes.items() if axis != "data")
    if world_size % rest:
        raise SpecError(
            f"parallel={format_value(dict(parallel))} on {world_size} ranks: all axes but data need a multiple of {rest} ranks. "
            f"Start {max(rest, world_size // rest * rest)}, or give another --parallel: the checkpoint loads under any"
        )
    fitted = {**parallel, "data": world_size // rest}
    return fitted, (
        f"the world size is {world_size} now: data={world_size // rest} in place of {before}; the global batch stays as it is"
    )
