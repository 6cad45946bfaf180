"""Python's garbage collector, which waits while a step runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context manager: the garbage collector of this process does not run; on exit it goes on if it did before.

    A full collection reads every object of the process. Once models are built it takes 60 to 140 ms, as long as a step, in which a
    GPU runs out of work and the other ranks wait. What a step makes is freed by its reference counts; garbage in cycles waits
    until the step ends.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
