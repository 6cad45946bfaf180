"""Seconds of parts of a model and of their messages on one machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from meshfold.engine.precision import Precision
from meshfold.engine.zero import regime_of
from meshfold.mesh import ParallelSpec
from meshfold.mesh.spec import ZeroSpec
from meshfold.planner.clock import Phases, Work
from meshfold.planner.estimates import Memory
from meshfold.planner.machines import Machine
from meshfold.planner.optimizer_state import CHUNK_BY_CHUNK, kept_by
from meshfold.planner.suggestions.layouts import Candidate
from meshfold.planner.suggestions.profile import Part, Step
from meshfold.zero_gemini.planner import Regime


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


@dataclass(kw_only=True)
class Clock:
    """Times candidates for one model, batch and machine.

    Attributes:
        machine: that runs them.
        batch_size: sequences of a global batch.
        precision: of compute.
        optimizer: a key of :data:`meshfold.planner.optimizer_state.MOMENTS`.
        clip: gradients are clipped by their norm.
    """

    machine: Machine
    batch_size: int
    precision: str
    optimizer: str
    clip: bool
    _works: dict[Any, Seconds] = field(default_factory=dict)
    _regimes: dict[Any, Regime] = field(default_factory=dict)
    waiting: dict[Any, Seconds] = field(default_factory=dict)

    def seconds_of(self, part: Part, rows: float, phase: str) -> Seconds:
        """Return the seconds of a part's operators in a phase of a micro-step: in turn, and of their launches."""
        key = (id(part), rows, phase)
        if key not in self._works:
            if phase == "summed":
                found = part.summed.backward.phases(self.machine, self.precision)
                self._works[key] = Seconds(found.device, found.host, 0.0)
                return self._works[key]

            def phases(step: Step) -> Phases:
                work: Work = getattr(step, phase)
                return work.phases(self.machine, self.precision)

            device, host = (
                part.at(rows, lambda step: phases(step).device),
                part.at(rows, lambda step: phases(step).host),
            )
            self._works[key] = Seconds(device, host, 0.0)
        return self._works[key]

    def regime_of(self, candidate: Candidate, held: Memory) -> Regime:
        """Return the bytes that an element takes under ``zero``; ``held``: of the model's parameters and their state without."""
        alone = candidate.accumulate == 1 and candidate.family.stages == 1
        spec = candidate.spec
        shared = candidate.family.data > 1 or (spec.sequence is not None and spec.sequence.size > 1)
        moments = held.optimizer / held.gradients if held.gradients else 0.0
        key = (shared, alone, moments)
        if key not in self._regimes:
            self._regimes[key] = regime_of(
                spec.zero or ZeroSpec(stage=1),
                Precision.parse(self.precision),
                accumulation=1 if alone else 2,
                ranks=2 if shared else 1,
                **kept_by(self.optimizer, moments)._asdict(),
            )
        return self._regimes[key]

    @property
    def waits_for_norm(self) -> bool:
        """True if no gradient is used before all have arrived."""
        return self.clip or self.optimizer not in CHUNK_BY_CHUNK or self.precision == "fp64"

    def messages(
        self, sizes: tuple[tuple[str, int], ...], kind: str, axes: tuple[str, ...], sent: float, calls: int
    ) -> float:
        """Return the seconds of collectives over axes of a mesh, given the bytes that they send together."""
        rate, known = self.machine.link_rate(sizes, axes, kind), dict(sizes)
        ranks = math.prod(known[axis] for axis in axes) if all(axis in known for axis in axes) else 0
        return self.machine.message_seconds(kind, sent, rate, calls=calls, ranks=ranks)

    def rate(self, spec: ParallelSpec, axes: tuple[str, ...]) -> float:
        """Return the bytes a second that a rank sends over axes of the spec's mesh in an all-reduce."""
        return self.machine.link_rate(tuple(spec.axes.items()), axes, "all_reduce")
