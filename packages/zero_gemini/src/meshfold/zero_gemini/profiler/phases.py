"""Seconds of compute of a forward and of its backward, while chunks live where a plan has put them.

Compute is not always the device's: small layers take as long as the host needs to launch them, and it needs longer while its
cores step the optimizer beside it. What a step tracer saw before there was a plan does not know of that. Nothing is hung on
modules here, so that blocks stay compiled as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshfold.zero_gemini.memory.copies import Waiting
from meshfold.zero_gemini.profiler.clocks import Clock


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Seconds of compute, waits left out.

    Attributes:
        forward: of the forward of one micro-step.
        backward: of its backward, with what is recomputed there.
    """

    forward: float
    backward: float


class PhaseClock:
    """Takes the time of one micro-step: ``begin``, then ``turn`` before its backward, then ``end`` after it."""

    def __init__(self, waiting: Waiting, clock: Clock) -> None:
        """Args:
        waiting: goes round what is waited for; this clock watches it from ``begin`` to ``end``.
        clock: knows seconds.
        """
        self._waiting, self._clock = waiting, clock
        self._marks: list[Any] = []
        self._stalls: list[tuple[int, Any, Any]] = []  # in which phase, from when, until when

    def begin(self) -> None:
        """Before the forward."""
        self._marks, self._stalls = [self._clock.mark()], []
        self._waiting.watch = self._stalled

    def turn(self) -> None:
        """Before the backward. Of several the first counts."""
        if len(self._marks) == 1:
            self._marks.append(self._clock.mark())

    def end(self) -> None:
        """After the backward."""
        if len(self._marks) == 2:
            self._marks.append(self._clock.mark())
        self.let_go()

    def let_go(self) -> None:
        """Watch no longer."""
        if self._waiting.watch == self._stalled:
            self._waiting.watch = None

    def take(self) -> PhaseSeconds | None:
        """Return the measured seconds, once; None unless all three were called."""
        marks, self._marks = self._marks, []
        if len(marks) < 3:
            return None
        spent = [self._clock.seconds(*marks[i : i + 2]) for i in range(2)]
        for phase, *stall in self._stalls:
            spent[phase] -= self._clock.seconds(*stall)
        return PhaseSeconds(*(max(0.0, seconds) for seconds in spent))

    @contextmanager
    def _stalled(self, what: str) -> Iterator[None]:
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._stalls.append((len(self._marks) - 1, begin, self._clock.mark()))
