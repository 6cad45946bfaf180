"""Python code beside the training: in short bursts, so that the thread that launches the training's kernels gets its turn.

Two threads of Python share one interpreter. One that only computes keeps it for five milliseconds at a time
(``sys.getswitchinterval``), and the training gives it up in every operation of torch: it would launch one kernel in five
milliseconds. Asleep for a moment, the thread lets it launch dozens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

BURST_S = 0.0002
"""How long the interpreter is kept: about what a large kernel runs, so that a GPU does not wait for the next one."""

PAUSE_S = 0.0001
"""How long it is left to others: what it takes a thread to wake up, and to launch some kernels."""

T = TypeVar("T")


def with_pauses(items: Iterable[T]) -> Iterator[T]:
    """Yield the items; sleep for a moment between two of them whenever ``BURST_S`` have passed."""
    since = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - since > BURST_S:
            time.sleep(PAUSE_S)
            since = time.perf_counter()
