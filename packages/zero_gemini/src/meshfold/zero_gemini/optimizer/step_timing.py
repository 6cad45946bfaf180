"""Timings of the optimizer's steps on the host while a model trains: elements and seconds, by kind of step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

StepKind = Literal["whole", "parameters", "moments", "passage", "second copy", "disk"]
"""Kind of an optimizer step: whole, one of its halves (see :mod:`meshfold.zero_gemini.optimizer.cpu_executor`), by the
device, into a second copy of the state, or of state on a disk."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Elements and seconds of some optimizer steps.

    Attributes:
        elements: that they stepped.
        seconds: that they took, one after the other; waiting for gradients is not in them, nor for a disk but for its own.
    """

    elements: int = 0
    seconds: float = 0.0

    def __add__(self, other: StepTiming) -> StepTiming:
        return StepTiming(self.elements + other.elements, self.seconds + other.seconds)


class StepTimer:
    """Sum of the timings of several threads, by kind of step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[StepKind, StepTiming] = {}

    @contextmanager
    def clock(self, what: StepKind, elements: int) -> Iterator[None]:
        """Context manager: time a step of so many elements; a step that raises does not count."""
        begin = time.perf_counter()
        yield
        took = StepTiming(elements, time.perf_counter() - begin)
        with self._lock:
            self._found[what] = self._found.get(what, StepTiming()) + took

    def take(self) -> dict[StepKind, StepTiming]:
        """Return the timings since the last call."""
        with self._lock:
            found, self._found = self._found, {}
        return found
