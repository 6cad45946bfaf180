"""How fast the optimizer's steps on the host are while a model trains: elements and seconds, by what was done."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

What = Literal["whole", "parameters", "moments", "passage", "second copy", "disk"]
"""A step in one go, its halves (see :mod:`meshfold.zero_gemini.optimizer.cpu_executor`), one that the device
makes, one into a second
copy of the state, or one of what is on a disk."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Some steps.

    Attributes:
        elements: that they stepped.
        seconds: that they took, one after the other; waiting for gradients is not in them, nor for a disk but for its own.
    """

    elements: int = 0
    seconds: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.elements + other.elements, self.seconds + other.seconds)


class Paces:
    """Adds up what several threads do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[What, Pace] = {}

    @contextmanager
    def clock(self, what: What, elements: int) -> Iterator[None]:
        """Around a step of so many elements; one that raises does not count."""
        begin = time.perf_counter()
        yield
        took = Pace(elements, time.perf_counter() - begin)
        with self._lock:
            self._found[what] = self._found.get(what, Pace()) + took

    def take(self) -> dict[What, Pace]:
        """What was done since the last call."""
        with self._lock:
            found, self._found = self._found, {}
        return found
