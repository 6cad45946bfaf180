"""Clocks of compute: by operator, by a GPU's events, or by wall time; and a clock of both phases.

Compute time is not always the device's. Small layers take as long as the host needs to launch them, and longer while its cores
step the optimizer. A trace made before the plan does not show that, so `PhaseClock` measures forward and backward with chunks
in the plan's placement. It registers no hooks on modules, so that blocks stay compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from meshfold.mesh.model_io import Operator, OperatorCounter
from meshfold.zero_gemini.memory.copies import Waiting
from meshfold.zero_gemini.planner.observed import Part


class Clock(Protocol):
    """Clock of compute: a context manager that runs while it is entered."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any, /) -> Any: ...

    def mark(self) -> Any:
        """Return a mark of the current time."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds from one mark to a later one. Call it when everything is over."""


class WallClock:
    """Wall time of this process: valid where operators are complete when they return, as on a CPU."""

    def __enter__(self) -> WallClock:
        return self

    def __exit__(self, *error: object) -> None: ...

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """Seconds between events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> CudaClock:
        return self

    def __exit__(self, *error: object) -> None: ...

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def roofline(*, flops: float, bytes_per_second: float) -> Callable[[Operator], float]:
    """Return a function from an operator to its seconds: the longer of its FLOP and of the bytes it reads and writes.

    Args:
        flops: FLOP/s of matmuls.
        bytes_per_second: of the device's memory, reads and writes together.
    """

    def seconds(operator: Operator) -> float:
        return max(operator.computed * operator.flop / flops, operator.bytes / bytes_per_second)

    return seconds


class OperatorClock(OperatorCounter):
    """Seconds that operators would take on a machine. Works on meta tensors."""

    def __init__(self, seconds_of: Callable[[Operator], float]) -> None:
        """Args:
        seconds_of: returns those of an operator, such as :func:`roofline`.
        """
        super().__init__()
        self._seconds_of, self._seconds = seconds_of, 0.0

    def mark(self) -> float:
        return self._seconds

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def note(self, operator: Operator) -> None:
        """Count an operator once, and its seconds."""
        super().note(operator)
        self._seconds += self._times * self._seconds_of(operator)


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Seconds of compute, waits left out.

    Attributes:
        forward: of the forward of one micro-step.
        backward: of its backward, with its recomputation.
        parts: the same between waits for parameters, in order; empty if it is not known where the waits were.
    """

    forward: float
    backward: float
    parts: tuple[Part, ...] = ()


class PhaseClock:
    """Timer of one micro-step: ``begin``, then ``turn`` before its backward, then ``end`` after it."""

    def __init__(self, waiting: Waiting, clock: Clock, place: Callable[[], int] | None = None) -> None:
        """Args:
        waiting: context manager around waits; this clock observes it from ``begin`` to ``end``.
        clock: measures seconds.
        place: returns how many units the step has entered; None: unknown.
        """
        self._waiting, self._clock, self._place = waiting, clock, place
        self._watching = ExitStack()
        self._marks: list[Any] = []
        self._stalls: list[_Stall] = []

    def begin(self) -> None:
        """Start timing, before the forward."""
        self._watching.close()
        self._marks, self._stalls = [self._clock.mark()], []
        self._watching.enter_context(self._waiting.watched(self._stalled))

    def turn(self) -> None:
        """Mark the start of the backward; of several calls the first counts."""
        if len(self._marks) == 1:
            self._marks.append(self._clock.mark())

    def end(self) -> None:
        """Stop timing, after the backward."""
        if len(self._marks) == 2:
            self._marks.append(self._clock.mark())
        self.stop()

    def stop(self) -> None:
        """Stop watching."""
        self._watching.close()

    def take(self) -> PhaseSeconds | None:
        """Return the measured seconds, once; None unless all three were called."""
        marks, self._marks = self._marks, []
        if len(marks) < 3:
            return None
        parts = [part for phase in range(2) for part in self._parts(phase, *marks[phase : phase + 2])]
        spent = [sum(part.seconds for part in parts if part.phase == phase) for phase in range(2)]
        return PhaseSeconds(max(0.0, spent[0]), max(0.0, spent[1]), tuple(parts) if self._place else ())

    def _parts(self, phase: int, begin: Any, end: Any) -> Iterator[Part]:
        """Yield the compute of a phase between waits for parameters, of which units have some at their beginning."""
        seconds = 0.0
        for stall in self._stalls:
            if stall.phase != phase:
                continue
            seconds += self._clock.seconds(begin, stall.begin)
            begin = stall.end
            if stall.entered is not None:
                yield Part(phase=phase, until=stall.entered, seconds=seconds)
                seconds = 0.0
        yield Part(phase=phase, until=None, seconds=seconds + self._clock.seconds(begin, end))

    @contextmanager
    def _stalled(self, what: str) -> Iterator[None]:
        begin = self._clock.mark()
        try:
            yield
        finally:
            entered = self._place() - 1 if self._place is not None and what in _AT_A_BEGINNING else None
            self._stalls.append(_Stall(len(self._marks) - 1, begin, self._clock.mark(), entered))


_AT_A_BEGINNING = ("parameters", "the optimizer's step")
"""Waits that a unit begins with."""


class _Stall(NamedTuple):
    phase: int
    begin: Any
    end: Any
    entered: int | None  # the timestep that it belongs to, if that begins with it
