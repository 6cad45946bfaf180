"""Trace of a micro-step: timesteps in the order in which they happened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMoment:
    """Interval from entering one unit to entering the next.

    What happened before the first entry counts to the first moment, the loss to the last of the forward.
    """

    unit: str
    """the unit that was entered"""
    backward: bool
    """whether the backward had begun; forwards that checkpointing repeats there count to it"""
    until: int
    """the last timestep in which the unit was still inside: units may lie in one another"""
    non_model_bytes: int
    """the most alive at once that are neither parameters, gradients nor optimizer state"""
    left_bytes: int
    """of those, alive at its end"""
    seconds: float
    """of compute"""
    waited_seconds: float
    """before it, between arriving at the unit and entering it: for its parameters"""
    stalled_seconds: float = 0.0
    """in it, while the host waited for the optimizer or for memory; not in ``seconds``"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedLayer:
    """A layer whose activations were recomputed in the backward, and may be kept instead."""

    name: str
    kept_bytes: int
    """storages that autograd would keep of it, each once, without parameters, buffers and the layer's inputs"""
    seconds: float
    """of compute that went into recomputing"""
    first: int
    """the timestep in which its forward began"""
    last: int
    """the last before the one in which it was recomputed"""
    before_bytes: int
    """the most alive at once in that one, before it was"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One micro-step."""

    moments: tuple[TracedMoment, ...]
    layers: tuple[TracedLayer, ...] = ()

    @property
    def forward_moments(self) -> int:
        """Number of timesteps in the forward."""
        return sum(not moment.backward for moment in self.moments)

    @property
    def seconds(self) -> float:
        """Seconds of compute, in total."""
        return sum(moment.seconds for moment in self.moments)

    @property
    def peak_bytes(self) -> int:
        """The most of any timestep."""
        return max((moment.non_model_bytes for moment in self.moments), default=0)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the units, as they were entered."""
        return tuple(moment.unit for moment in self.moments)
