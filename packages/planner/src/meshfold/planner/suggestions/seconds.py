"""Seconds of a phase of a step, by who spends them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a phase: operators in turn, their launches by the host, and messages that they wait for."""

    in_turn: float
    launches: float
    waits: float

    @property
    def apart(self) -> float:
        """Seconds of operators and messages if launching took no time, as the plan of ``zero`` has it."""
        return self.in_turn + self.waits

    @property
    def spent(self) -> float:
        """Seconds of operators and messages, or as long as the host needs to launch them."""
        return max(self.apart, self.launches)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.in_turn + other.in_turn, self.launches + other.launches, self.waits + other.waits)

    def __mul__(self, times: float) -> Seconds:
        return Seconds(self.in_turn * times, self.launches * times, self.waits * times)
