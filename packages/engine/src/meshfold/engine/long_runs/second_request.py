"""A second request to stop ends the process at once, also where its main thread waits in C code and Python's handlers wait with it.

Python writes the number of every signal into a pipe before it runs a handler. A thread reads it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Collection

SAME_S = 1.0
"""Of one request: a batch system may ask every process, and the launcher passes on what it is asked"""

_open: weakref.WeakSet[SecondRequest] = weakref.WeakSet()


class SecondRequest:
    """Waits for a second signal of the same number, at least :data:`SAME_S` seconds after the first; made by the main thread.

    Where the process has given Python a descriptor for signals already, as asyncio does, nothing is waited for.
    """

    def __init__(self, numbers: Collection[int], *, says: bool) -> None:
        """Args:
        numbers: the signals.
        says: whether the end is said on standard error.
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
        """Wait no more; called by the main thread."""
        if self not in _open:
            return
        _open.discard(self)
        if self._before == -1:
            signal.set_wakeup_fd(-1)
        os.close(self._writer)  # which ends the thread

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
        """In a forked child: its signals are not the parent's."""
        if self._before == -1:
            signal.set_wakeup_fd(-1)
        os.close(self._writer)
        os.close(self._reader)


def _forget() -> None:
    for one in list(_open):
        one._leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_forget)
