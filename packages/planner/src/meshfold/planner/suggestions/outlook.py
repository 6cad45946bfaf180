"""Seconds and bytes of a candidate from the profile of its layout: by the formulas of a whole plan, without making one.

:func:`outlook` follows :func:`meshfold.planner.step_speed`: operators in turn, messages that the next operator waits for,
gradients and parameters that travel meanwhile, the optimizer. Stages take their share of the blocks; a schedule's idle time is that
of equal stages, or, with ``simulate``, of the schedule itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from meshfold.engine.states import BUCKET_BYTES
from meshfold.mesh import ParallelSpec
from meshfold.pipeline import Costs, schedule, simulate_costs
from meshfold.planner.clock import Work, optimizer_seconds
from meshfold.planner.estimates import MOMENTS, Memory
from meshfold.planner.machines import OPTIMIZER, Machine, leaves_node
from meshfold.planner.suggestions.layouts import Candidate
from meshfold.planner.suggestions.profile import Message, Part, Profile, Step
from meshfold.planner.suggestions.stages import idle_share, live_microbatches, rank_of, stage_blocks
from meshfold.zero_gemini.planner import REGIMES

_WORKSPACE = 66 * 2**20


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of operators in turn, of their launches by the host, and of messages that they wait for."""

    in_turn: float
    launches: float
    waits: float

    @property
    def compute(self) -> float:
        """Seconds of the operators: in turn, or as long as the host needs to launch them."""
        return max(self.in_turn, self.launches)

    @property
    def spent(self) -> float:
        """Seconds of operators and messages."""
        return self.compute + self.waits

    @property
    def apart(self) -> float:
        """The same if launching took no time, as the plan of ``zero`` has it."""
        return self.in_turn + self.waits

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.in_turn + other.in_turn, self.launches + other.launches, self.waits + other.waits)

    def __mul__(self, times: float) -> Seconds:
        return Seconds(self.in_turn * times, self.launches * times, self.waits * times)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Expected seconds and bytes of a candidate.

    Attributes:
        seconds: of an optimizer step.
        compute: of operators, repeated ones included.
        waits: of messages that the next operator waits for.
        idle: of a pipeline's schedule.
        hidden: of gradients and parameters that travel meanwhile.
        shown: the part of these that nothing hides.
        optimizer: of its step.
        offload: of copies between a device and its host that nothing hides.
        memory: bytes that the fullest rank holds; more than a device has means that state moves to the host.
        state: bytes of it that a plan of ``zero`` can move to the host: parameters, gradients, the optimizer's.
    """

    seconds: float
    compute: float
    waits: float
    idle: float
    hidden: float
    shown: float
    optimizer: float
    offload: float
    memory: float
    state: float

    def costs(self) -> dict[str, float]:
        """Return the seconds by what they are for, longest first."""
        parts = {
            "compute": self.compute,
            "messages that the next operator waits for": self.waits,
            "idle stages": self.idle,
            "gradients and parameters that nothing hides": self.shown,
            "the optimizer": self.optimizer,
            "copies to and from the host": self.offload,
        }
        return {
            what: seconds
            for what, seconds in sorted(parts.items(), key=lambda item: -item[1])
            if seconds > 1e-6 * self.seconds
        }


@dataclass(kw_only=True)
class Clock:
    """Times candidates for one model, batch and machine.

    Attributes:
        machine: that runs them.
        batch_size: sequences of a global batch.
        precision: of compute.
        optimizer: a key of :data:`meshfold.planner.estimates.MOMENTS`.
        clip: gradients are clipped by their norm.
    """

    machine: Machine
    batch_size: int
    precision: str
    optimizer: str
    clip: bool
    _works: dict[Any, Seconds] = field(default_factory=dict)

    def outlook(self, candidate: Candidate, profile: Profile, *, simulate: bool = False) -> Outlook:
        """Return a candidate's outlook.

        Args:
            candidate: of the profile's layout.
            profile: of the layout.
            simulate: simulate the schedule of a pipeline, which takes milliseconds.
        """
        return _Reckoning(self, candidate, profile).outlook(simulate=simulate)

    def seconds_of(self, part: Part, rows: float, phase: str) -> Seconds:
        """Return the seconds of a part's operators in a phase of a micro-step: in turn, and of their launches."""
        key = (id(part), rows, phase)
        if key not in self._works:
            free, count = replace(self.machine, launch=0.0), self.machine.launch
            if phase == "summed":
                work = part.summed.backward
                launched = count * sum(work.operators.values())
                self._works[key] = Seconds(work.seconds(free, self.precision), launched, 0.0)
                return self._works[key]

            def launches(step: Step) -> float:
                work: Work = getattr(step, phase)
                return count * sum(work.operators.values())

            def in_turn(step: Step) -> float:
                work: Work = getattr(step, phase)
                return work.seconds(free, self.precision)

            self._works[key] = Seconds(part.at(rows, in_turn), part.at(rows, launches), 0.0)
        return self._works[key]

    @property
    def waits_for_norm(self) -> bool:
        """True if no gradient is used before all have arrived."""
        return self.clip or MOMENTS[self.optimizer] != 2 or self.precision == "fp64"

    def rate(self, spec: ParallelSpec, axes: tuple[str, ...]) -> float:
        """Return the bytes a second that a rank sends over axes of the spec's mesh."""
        leaves = leaves_node(self.machine.devices, tuple(spec.axes.items()), axes)
        return self.machine.between if leaves else self.machine.inside


class _Reckoning:
    """One candidate's numbers."""

    def __init__(self, clock: Clock, candidate: Candidate, profile: Profile) -> None:
        self.clock, self.candidate, self.profile = clock, candidate, profile
        self.spec, self.machine, self.shape = candidate.spec, clock.machine, profile.shape
        self.stages, self.micro = candidate.family.stages, candidate.microbatches
        self.rows = clock.batch_size / candidate.family.data / self.micro
        chunks = 1 if self.spec.pipeline is None else self.spec.pipeline.chunks or 1
        self.counts = stage_blocks(self.shape, self.stages * chunks)
        self.repeated = (
            0.0 if candidate.recompute is None else 1.0
        )  # share of blocks that compute their activations again
        self.zero = self.spec.zero
        self.outer = tuple(
            axis for axis, size in self.spec.axes.items() if axis in ("data", "seq", "ring", "ulysses") and size > 1
        )
        self.ranks = math.prod(self.spec.axes[axis] for axis in self.outer)
        if candidate.recompute == "auto":
            self.repeated = self._share_to_repeat()

    # -- time ------------------------------------------------------------------------------------------------

    def _seconds(self, part: Part, phase: str) -> Seconds:
        """Return a micro-step's seconds of a part's forward or backward, and of the messages that the next operator waits for."""
        found, waits = self.clock.seconds_of(part, self.rows, phase), 0.0
        for (when, axes, of_weights), (sent, calls) in self._messages(part):
            if (when == "backward") == (phase == "backward") and when != "gradients" and not of_weights:
                waits += calls * self.machine.latency + sent / self.clock.rate(self.spec, axes)
        return Seconds(found.in_turn, found.launches, waits)

    def _sums(self, part: Part) -> Seconds:
        """Return a micro-step's seconds of adding up gradients, without ``zero``."""
        return Seconds(0.0, 0.0, 0.0) if self.zero is not None else self.clock.seconds_of(part, 0, "summed")

    def _messages(self, part: Part) -> list[tuple[Message, tuple[float, int]]]:
        """Return a micro-step's messages with their bytes and calls."""
        last = part.steps[max(part.steps)]
        return [
            (key, (part.at(self.rows, lambda step, key=key: step.messages.get(key, (0.0, 0))[0]), calls))  # type: ignore[misc]
            for key, (_, calls) in last.messages.items()
        ]

    def _hidden(self, held: Memory) -> float:
        """Return the seconds of gradients and parameters that travel in a step."""
        total = 0.0
        for part, times in ((self.profile.block, max(self._of_ranks())), (self.profile.rest, 1)):
            for (_, axes, of_weights), (sent, calls) in self._messages(part):
                if of_weights:
                    again = times * self.micro
                    total += again * (calls * self.machine.latency + sent / self.clock.rate(self.spec, axes))
            for (phase, axes, _), (sent, calls) in part.summed.messages.items():
                if phase == "gradients" and self.spec.expert is not None and self.zero is None:
                    total += times * (calls * self.machine.latency + sent / self.clock.rate(self.spec, axes))
        if self.ranks == 1 or (self.spec.expert is not None and self.zero is None):
            return total
        rate, share = self.clock.rate(self.spec, self.outer), (self.ranks - 1) / self.ranks
        if self.zero is None:
            calls = -(-held.gradients // BUCKET_BYTES)
            return total + 2 * share * held.gradients / rate + calls * self.machine.latency
        gathers, reductions = self._collectives(held)
        return total + gathers + reductions

    def _collectives(self, held: Memory) -> tuple[float, float]:
        """Return the seconds of gathering parameters in a step under ``zero``, and of reducing gradients."""
        if self.ranks == 1 or self.zero is None:
            return 0.0, 0.0
        once = (self.ranks - 1) / self.ranks * held.parameters / self.clock.rate(self.spec, self.outer)
        uses = 2 * self.micro if self.zero.stage == 3 and self.spec.pipeline is None else 1 + (self.zero.stage == 3)
        return uses * once, (self.candidate.accumulate if self.zero.stage > 1 else 1) * once

    def _of_ranks(self) -> list[int]:
        """Return the blocks of each rank of the pipeline."""
        found = [0] * self.stages
        for stage, count in enumerate(self.counts):
            found[rank_of(stage, self.stages, self.spec.pipeline)] += count
        return found

    def _held(self) -> Memory:
        """Return the memory of the fullest rank's parameters and their state."""
        of_ranks = self._of_ranks()
        rest, whole = self.profile.rest.memory, self.profile.memory(0)
        if self.stages == 1:
            return self.profile.memory(of_ranks[0])
        block = self.profile.block.memory
        share = self._edge_share()
        last = rank_of(len(self.counts) - 1, self.stages, self.spec.pipeline)
        totals = []
        for rank, count in enumerate(of_ranks):
            edge = (share if rank == 0 else 0.0) + ((1 - share) if rank == last else 0.0)
            totals.append((count * block.total + edge * rest.total, count, edge))
        _, count, edge = max(totals)
        scaled = {
            name: round(count * getattr(block, name) + edge * getattr(whole, name))
            for name in ("parameters", "masters", "gradients", "optimizer")
        }
        return Memory(**scaled, activations=0)

    def _edge_share(self) -> float:
        """Return the share of parameters outside blocks that the first stage has."""
        total = self.shape.embedded + self.shape.head
        return self.shape.embedded / total if total else 0.0

    def outlook(self, *, simulate: bool) -> Outlook:
        """Return all numbers."""
        held = self._held()
        memory, state = self._memory(held)
        block, rest = self.profile.block, self.profile.rest
        once = self._seconds(block, "forward")
        ahead = (once, self._seconds(rest, "forward"))
        back = (
            self._seconds(block, "backward") + self._sums(block) + once * self.repeated,
            self._seconds(rest, "backward") + self._sums(rest),
        )
        if self.stages == 1:
            blocks, idle = self.shape.blocks, 0.0
            forward, backward = ((one * blocks + other) * self.micro for one, other in (ahead, back))
            total = forward + backward
        else:
            total, idle = self._pipelined(ahead, back, simulate=simulate)
            forward, backward = total * (1 / 3), total * (2 / 3)
        hidden, optimizer, offload = self._hidden(held), self._optimizer(held), 0.0
        busy = total.spent + idle
        if self.zero is None:
            seconds = max(busy, hidden) + optimizer
        else:
            gathers, reductions = self._collectives(held)
            offload = self._offload(memory, busy)
            if self.stages > 1:
                seconds = max(busy, hidden, gathers + reductions + optimizer)
            elif self.clock.waits_for_norm:
                before = gathers / 2 if self.zero.stage == 3 else gathers
                seconds = max(forward.apart + optimizer, before) + max(backward.apart, gathers - before + reductions)
            else:
                seconds = max(total.apart + optimizer, gathers + reductions)
            seconds = max(seconds, total.compute) + offload
        return Outlook(
            seconds=seconds,
            compute=total.compute,
            waits=total.waits,
            idle=idle,
            hidden=hidden,
            shown=max(0.0, seconds - offload - busy - optimizer),
            optimizer=optimizer,
            offload=offload,
            memory=memory,
            state=state,
        )

    def _pipelined(
        self, ahead: tuple[Seconds, Seconds], back: tuple[Seconds, Seconds], *, simulate: bool
    ) -> tuple[Seconds, float]:
        """Return the work of the busiest rank, and its idle time; both parts: of a block, and of all else."""
        pipeline = self.spec.pipeline
        assert pipeline is not None  # it has stages
        last = len(self.counts) - 1
        nothing = Seconds(0.0, 0.0, 0.0)
        forward, backward = (
            [one * n + (rest if stage == last else nothing) for stage, n in enumerate(self.counts)]
            for one, rest in (ahead, back)
        )
        busy = [nothing] * self.stages
        for stage, (one, two) in enumerate(zip(forward, backward, strict=True)):
            rank = rank_of(stage, self.stages, pipeline)
            busy[rank] = busy[rank] + (one + two) * self.micro
        most, message = max(busy, key=lambda work: work.spent), self._message()
        if not simulate:
            return most, idle_share(pipeline) * most.spent / self.micro + 2 * (self.stages - 1) * message
        again = ahead[0].spent * self.repeated
        weight = [max(0.0, work.spent - n * again) / 2 for work, n in zip(backward, self.counts, strict=True)]
        costs = Costs(
            forward=[work.spent for work in forward],
            backward_input=[work.spent - apart for work, apart in zip(backward, weight, strict=True)],
            backward_weight=weight,
            send=message,
        )
        made = schedule(
            pipeline.schedule_name,
            ranks=self.stages,
            microbatches=self.micro,
            chunks=pipeline.chunks if pipeline.schedule == "interleaved" else None,
            waves=pipeline.waves,
        )
        return most, max(0.0, simulate_costs(made, costs).makespan - most.spent)

    def _message(self) -> float:
        """Return the seconds of a message between neighbouring stages."""
        return self.machine.latency + self._stream() / self.clock.rate(self.spec, ("pipe",))

    def _stream(self) -> float:
        """Return the bytes of a block's input."""
        return self.profile.block.at(self.rows, lambda step: step.stream)

    def _optimizer(self, held: Memory) -> float:
        if self.zero is None:
            return optimizer_seconds(held.update_bytes(clip=self.clock.clip), self.machine)
        regime = REGIMES.get("A" if self.clock.precision == "bf16" else self.clock.precision, REGIMES["A"])
        elements = self._elements(held) / self.ranks
        return elements * regime.step / (OPTIMIZER * self.machine.memory_rate)

    def _elements(self, held: Memory) -> float:
        """Return the elements of the fullest rank's parameters."""
        width = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[self.clock.precision]
        return held.parameters / width

    # -- memory ----------------------------------------------------------------------------------------------

    def _memory(self, held: Memory) -> tuple[float, float]:
        """Return the bytes on the fullest device with all state on it, and those of them that can move to its host."""
        activations = self._activations()
        if self.zero is None:
            return held.total + activations, 0.0
        regime = REGIMES.get("A" if self.clock.precision == "bf16" else self.clock.precision, REGIMES["A"])
        elements = self._elements(held)
        shard = elements / self.ranks
        stage = self.zero.stage
        parameters = regime.parameter * (elements if stage < 3 else shard)
        gradients = regime.gradient * (shard if stage > 1 or self.candidate.accumulate == 1 else elements)
        largest = max(self.profile.block.elements, self.profile.rest.elements / 2)
        passing = (regime.parameter * (stage == 3) + regime.gradient) * largest * (self.ranks > 1)
        state = parameters + gradients + regime.state * shard
        return state + passing + activations + _WORKSPACE, state

    def _activations(self, repeated: float | None = None) -> float:
        """Return the bytes kept for backward on the fullest rank."""
        repeated = self.repeated if repeated is None else repeated
        kept = self.profile.block.at(self.rows, lambda step: step.saved)
        block = (
            (1 - repeated) * kept + repeated * self._stream() + (kept if repeated else 0.0) / max(1, self.shape.blocks)
        )
        rest = max(0.0, self.profile.rest.at(self.rows, lambda step: step.saved))
        if self.stages == 1 or self.spec.pipeline is None:
            return self.shape.blocks * block + rest
        return max(self._of_ranks()) * block * live_microbatches(self.spec.pipeline, self.micro) + rest

    def _share_to_repeat(self) -> float:
        """Return the share of blocks that a plan must let compute their activations again to fit."""
        held = self._held()
        without, with_all = self._activations(0.0), self._activations(1.0)
        over = self._memory(held)[0] - self._activations() + without - self.machine.memory
        return min(1.0, max(0.0, over / (without - with_all))) if without > with_all else 0.0

    def _offload(self, memory: float, busy: float) -> float:
        """Return the seconds of copies of state that does not fit, beyond what compute hides."""
        over = memory - self.machine.memory
        if over <= 0:
            return 0.0
        moved = 2 * over / self.machine.host.both * self.candidate.accumulate
        return max(0.0, moved - busy)
