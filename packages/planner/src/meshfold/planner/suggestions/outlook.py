"""Seconds and bytes of a candidate from the profile of its layout: by the formulas of a whole plan, without making one.

:func:`outlook_of` follows :func:`meshfold.planner.step_speed`: operators in turn, messages that the next operator waits for,
gradients and parameters that travel meanwhile, the optimizer. Stages take their share of the blocks; a schedule's idle time is that
of equal stages, or, with ``simulate``, of the schedule itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.engine.states import BUCKET_BYTES
from meshfold.pipeline import Costs, schedule, simulate_costs
from meshfold.planner.clock import Phases, update_seconds
from meshfold.planner.collected_gradients import copy_seconds, moved_bytes
from meshfold.planner.estimates import Memory
from meshfold.planner.step_bytes import workspace_bytes
from meshfold.planner.suggestions.host_loads import HostLoads
from meshfold.planner.suggestions.layouts import Candidate
from meshfold.planner.suggestions.part_clock import Clock, Seconds
from meshfold.planner.suggestions.profile import Message, Part, Profile
from meshfold.planner.suggestions.rank_bytes import RankBytes
from meshfold.planner.suggestions.stages import idle_share, rank_of


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
        repeated: share of blocks that compute their activations again.
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
    repeated: float = 0.0

    def costs(self) -> dict[str, float]:
        """Return the seconds by purpose, longest first."""
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


def outlook_of(clock: Clock, candidate: Candidate, profile: Profile, *, simulate: bool = False) -> Outlook:
    """Return a candidate's outlook.

    Args:
        clock: of the model, batch and machine.
        candidate: of the profile's layout.
        profile: of the layout.
        simulate: simulate the schedule of a pipeline, which takes milliseconds.
    """
    return _Reckoning(clock, candidate, profile).outlook(simulate=simulate)


class _Reckoning:
    """One candidate's numbers."""

    def __init__(self, clock: Clock, candidate: Candidate, profile: Profile) -> None:
        self.clock, self.candidate, self.profile = clock, candidate, profile
        self.spec, self.machine, self.shape = candidate.spec, clock.machine, profile.shape
        self.bytes = RankBytes(
            candidate,
            profile,
            batch_size=clock.batch_size,
            regime=clock.regime_of(candidate, profile.memory(profile.shape.blocks)),
            clips=clock.waits_for_norm,
            limit=clock.machine.memory,
            workspace=workspace_bytes(clock.machine.kind),
        )
        self.stages, self.micro, self.rows = candidate.family.stages, self.bytes.micro, self.bytes.rows
        self.counts, self.repeated, self.zero = self.bytes.counts, self.bytes.repeated, self.spec.zero
        self.outer, self.ranks = self.bytes.outer, self.bytes.ranks
        self.axes = tuple(self.bytes.axes.items())

    def outlook(self, *, simulate: bool) -> Outlook:
        """Return all numbers."""
        held = self.bytes.held()
        block, rest = self.profile.block, self.profile.rest
        once = self._seconds(block, "forward")
        ahead = (once, self._seconds(rest, "forward"))
        back = (
            self._seconds(block, "backward") + self._sums(block) + once * self.repeated,
            self._seconds(rest, "backward") + self._sums(rest),
        )
        live: Sequence[float] | None = None
        if self.stages == 1:
            blocks, idle = self.shape.blocks, 0.0
            forward, backward = (one * blocks + other for one, other in (ahead, back))
            forward += Seconds(0.0, 0.0, self._exchanged())
            backward += self._collecting(held)
            ending = self._ending(held)
        else:
            forward, backward, idle, live = self._pipelined(ahead, back, simulate=simulate)
            ending = Seconds(0.0, 0.0, 0.0)
        memory, state = self.bytes.total(live)
        (hidden, shown), (optimizer, launched), offload = self._hidden(held), self._update(held), 0.0
        first, then = forward * self.micro + ending, backward * self.micro
        phases = Phases(
            forward=first.in_turn,
            backward=then.in_turn,
            launched_forward=first.launches,
            launched_backward=then.launches,
            runs=self.micro,
        )
        waits, compute = first.waits + then.waits, phases.seconds
        # A stage's actions come one by one, of other stages between them.
        waiting = phases.waiting(first.waits, then.waits)
        together = waiting.seconds if self.stages == 1 else first.spent + then.spent
        busy, host = together + idle, phases.host + launched
        late = self._late(held)
        exposed = shown * min(1.0, together / (hidden - late)) if hidden > late else 0.0
        if self.zero is None:
            seconds = max(max(busy, hidden - late) + exposed + late + optimizer, host)
        else:
            loads = self._host_loads(memory, held)
            alone, chunks = (
                self._with_chunks(forward.apart, backward.apart, optimizer, held, beside)
                for beside in (HostLoads(), loads)
            )
            beside_stages = max(busy, hidden) if self.stages > 1 else 0.0
            offload = max(0.0, max(beside_stages, chunks) - max(beside_stages, alone))
            waited = waiting.idle if self.stages == 1 else 0.0
            seconds = max(max(beside_stages, chunks) + waited + exposed + late, compute, host)
        return Outlook(
            seconds=seconds,
            compute=compute,
            waits=waits,
            idle=idle,
            hidden=hidden,
            shown=max(0.0, seconds - offload - busy - optimizer),
            optimizer=optimizer,
            offload=offload,
            memory=memory,
            state=state,
            repeated=self.repeated,
        )

    def _seconds(self, part: Part, phase: str) -> Seconds:
        """Return a micro-step's seconds of a part's forward or backward, and of the messages that the next operator waits for."""
        key = (id(part), self.rows, phase, self.axes)
        if key not in self.clock.waiting:
            found, waits = self.clock.seconds_of(part, self.rows, phase), 0.0
            for (when, kind, axes, of_weights), (sent, calls) in self._messages(part):
                if (when == "backward") == (phase == "backward") and when != "gradients" and not of_weights:
                    waits += self.clock.messages(self.axes, kind, axes, sent, calls)
            self.clock.waiting[key] = Seconds(found.in_turn, found.launches, waits)
        return self.clock.waiting[key]

    def _sums(self, part: Part) -> Seconds:
        """Return a micro-step's seconds of adding up gradients, without ``zero``."""
        return Seconds(0.0, 0.0, 0.0) if self.zero is not None else self.clock.seconds_of(part, 0, "summed")

    def _collecting(self, held: Memory) -> Seconds:
        """Return a micro-step's seconds of copies of gradients into chunks."""
        if self.zero is None:
            return Seconds(0.0, 0.0, 0.0)
        regime, machine, parts = (
            self.bytes.regime,
            self.machine,
            (self.profile.block.updated, self.profile.rest.updated),
        )
        each = moved_bytes(self.zero, regime, ranks=self.ranks, accumulation=self.micro)
        copies = self.shape.blocks * parts[0] + parts[1]
        launches = copies * machine.launches.backward * bool(each)
        return Seconds(copy_seconds(self.bytes.elements(held), each, regime, machine, copies), launches, 0.0)

    def _exchanged(self) -> float:
        """Return a micro-step's seconds of messages that a layout of one data rank lacks: numbers of tokens, and the loss."""
        if self.candidate.family.data == 1 or self.spec.expert is not None or self._splits_tokens:
            return 0.0
        kinds = ("all_gather", "all_reduce") if self.zero is None else ("all_gather",)
        return sum(self.clock.messages(self.axes, kind, self.outer, 0.0, 1) for kind in kinds)

    @property
    def _splits_tokens(self) -> bool:
        """True if the layout has ranks of a sequence, whose messages are those of its data ranks."""
        return self.spec.sequence is not None and self.spec.sequence.size > 1

    def _ending(self, held: Memory) -> Seconds:
        """Return a step's seconds after its last backward without ``zero``: of buckets that are summed, and of the norm."""
        every = tuple(axis for axis, size in self.axes if size > 1)
        if self.zero is not None or not every:
            return Seconds(0.0, 0.0, 0.0)
        # A sum over ranks copies a bucket: an operator that reads and writes it.
        moved = 0.0 if self.ranks == 1 or self.spec.expert is not None or self._splits_tokens else 2.0 * held.gradients
        rate = self.machine.efficiency.elementwise * self.machine.memory_rate
        return Seconds(moved / rate, 0.0, self.clock.messages(self.axes, "all_reduce", every, 0.0, 1))

    def _messages(self, part: Part) -> list[tuple[Message, tuple[float, int]]]:
        """Return a micro-step's messages with their bytes and calls."""
        last = part.steps[max(part.steps)]
        return [
            (key, (part.at(self.rows, lambda step, key=key: step.messages.get(key, (0.0, 0))[0]), calls))  # type: ignore[misc]
            for key, (_, calls) in last.messages.items()
        ]

    def _hidden(self, held: Memory) -> tuple[float, float]:
        """Return the seconds of gradients and parameters that travel in a step, and what matmuls beside them do not hide."""
        found: list[tuple[str, tuple[str, ...], float]] = []  # kind, axes, seconds
        for part, times in ((self.profile.block, max(self.bytes.of_ranks)), (self.profile.rest, 1)):
            for (_, kind, axes, of_weights), (sent, calls) in self._messages(part):
                if of_weights:
                    again = times * self.micro
                    found.append((kind, axes, again * self.clock.messages(self.axes, kind, axes, sent, calls)))
            for (phase, kind, axes, _), (sent, calls) in part.summed.messages.items():
                if phase == "gradients" and self.spec.expert is not None and self.zero is None:
                    found.append((kind, axes, times * self.clock.messages(self.axes, kind, axes, sent, calls)))
        if self.ranks > 1 and self.zero is not None:
            gather, reduction = self._collectives(held)
            gathers, sums = 2 * self.micro if self.zero.stage == 3 else 1, 1 if self._sums_once else self.micro
            # a chunk for each block, and for what is before and behind
            latency = (max(self.bytes.of_ranks) + 2) * self.machine.latency
            found.append(("all_gather", self.outer, gathers * (gather + latency)))
            found.append(("reduce_scatter", self.outer, sums * (reduction + latency)))
        elif self.ranks > 1 and self.spec.expert is None:
            found.append(("all_reduce", self.outer, self._reduction(held)))
        total, late, shown = sum(seconds for *_, seconds in found), self._late(held), 0.0
        for kind, axes, seconds in found:
            beside = seconds
            if axes == self.outer and kind == ("all_reduce" if self.zero is None else "all_gather"):
                beside -= late
            shown += self.machine.shown_seconds(kind, beside, self.machine.link_rate(self.axes, axes, kind))
        return total, shown

    def _reduction(self, held: Memory) -> float:
        """Return the seconds of summing all gradients over the data ranks, without ``zero``."""
        sent, calls = 2 * (self.ranks - 1) / self.ranks * held.gradients, -(-held.gradients // BUCKET_BYTES)
        return self.clock.messages(self.axes, "all_reduce", self.outer, sent, calls)

    def _late(self, held: Memory) -> float:
        """Return the seconds of messages when no compute is left.

        Without ``zero``: gradients that are summed when a pipeline's schedule has ended. In its stages 1 and 2: parameters that are
        gathered after the optimizer's step.
        """
        if self.zero is not None and self.zero.stage < 3 and self.ranks > 1:
            return self._collectives(held)[0] + (max(self.bytes.of_ranks) + 2) * self.machine.latency
        if self.stages == 1 or self.ranks == 1 or self.zero is not None or self.spec.expert is not None:
            return 0.0
        return self._reduction(held) * self.stages / len(self.counts)

    @property
    def _sums_once(self) -> bool:
        """True if ``zero`` sums gradients over the ranks after the last micro-step only."""
        return self.zero is not None and (self.zero.stage == 1 or self.stages > 1)

    def _collectives(self, held: Memory) -> tuple[float, float]:
        """Return the seconds of gathering all parameters once under ``zero``, and of reducing all gradients once."""
        if self.ranks == 1:
            return 0.0, 0.0
        rate, share = self.machine.link_rate(self.axes, self.outer), (self.ranks - 1) / self.ranks
        return share * held.parameters / rate, share * self.bytes.elements(held) * self.bytes.regime.gradient / rate

    def _with_chunks(self, forward: float, backward: float, optimizer: float, held: Memory, beside: HostLoads) -> float:
        """Return the seconds of a step under ``zero`` as its plan has them: compute, collectives or the host take each phase.

        Args:
            forward: seconds of a micro-step's.
            backward: the same.
            optimizer: of its step.
            held: by the rank.
            beside: the host.
        """
        optimizer *= 1.0 - beside.stepped
        gather, reduction = self._collectives(held)
        later_gather, again = (gather, gather) if self.zero is not None and self.zero.stage == 3 else (0.0, 0.0)
        later_sum = 0.0 if self._sums_once else reduction
        waits = self.clock.waits_for_norm or self.stages > 1
        if waits or (self.micro > 1 and not self._sums_once):
            parts = (forward + optimizer, backward) if waits else (forward + backward + optimizer, 0.0)
        else:
            parts = (forward, backward + optimizer)
        first, second = parts
        if second:
            seconds = max(first, gather, beside.first) + max(second, again + reduction, beside.last)
        else:
            seconds = max(first, gather + again + reduction, beside.first + beside.last)
        later = max(forward, later_gather, beside.forward) + max(backward, again + later_sum, beside.backward)
        return seconds + (self.micro - 1) * later

    def _pipelined(
        self, ahead: tuple[Seconds, Seconds], back: tuple[Seconds, Seconds], *, simulate: bool
    ) -> tuple[Seconds, Seconds, float, Sequence[float] | None]:
        """Return a micro-batch's forward and backward on the busiest rank, its idle time in a step, and what ranks hold at once.

        Args:
            ahead: forward of a block, and of all else.
            back: backward of both.
            simulate: the schedule; else its idle time is that of equal stages.
        """
        pipeline = self.spec.pipeline
        assert pipeline is not None  # it has stages
        last = len(self.counts) - 1
        nothing = Seconds(0.0, 0.0, 0.0)
        forward, backward = (
            [one * n + (rest if stage == last else nothing) for stage, n in enumerate(self.counts)]
            for one, rest in (ahead, back)
        )
        busy = [(nothing, nothing)] * self.stages
        for stage, (one, two) in enumerate(zip(forward, backward, strict=True)):
            rank = rank_of(stage, self.stages, pipeline)
            busy[rank] = busy[rank][0] + one, busy[rank][1] + two
        (most, most_back), message = max(busy, key=lambda work: work[0].spent + work[1].spent), self._message()
        spent = most.spent + most_back.spent
        if not simulate:
            return most, most_back, idle_share(pipeline) * spent + 2 * (self.stages - 1) * message, None
        again = ahead[0].spent * self.repeated
        weight = [max(0.0, work.spent - n * again) / 2 for work, n in zip(backward, self.counts, strict=True)]
        costs = Costs(
            forward=[work.spent for work in forward],
            backward_input=[work.spent - apart for work, apart in zip(backward, weight, strict=True)],
            backward_weight=weight,
            send=message,
        )
        found = simulate_costs(
            schedule(
                pipeline.schedule_name,
                ranks=self.stages,
                microbatches=self.micro,
                chunks=pipeline.chunks if pipeline.schedule == "interleaved" else None,
                waves=pipeline.waves,
            ),
            costs,
        )
        return most, most_back, max(0.0, found.makespan - self.micro * spent), found.peak_microbatches

    def _message(self) -> float:
        """Return the seconds of a message between neighbouring stages."""
        return self.clock.messages(self.axes, "send", ("pipe",), self.bytes.stream, 1)

    def _update(self, held: Memory) -> tuple[float, float]:
        """Return the seconds of the optimizer's step: of the device, and of the host that launches it."""
        block, rest = self.profile.block, self.profile.rest
        parameters = max(self.bytes.of_ranks) * block.updated + rest.updated
        moved = 0 if self.zero is not None else held.update_bytes(clip=self.clock.clip)
        plain, launched = update_seconds(moved, parameters, self.machine)
        if self.zero is None:
            return plain, launched
        elements = self.bytes.elements(held) / self.ranks
        return elements * self.bytes.regime.step / (
            self.machine.efficiency.optimizer * self.machine.memory_rate
        ), launched

    def _host_loads(self, memory: float, held: Memory) -> HostLoads:
        """Return the seconds of copies and steps of state that does not fit."""
        return HostLoads.of(
            memory - self.machine.memory,
            self.bytes.elements(held) / self.ranks,
            self.bytes.regime,
            self.machine,
            ranks=min(self.machine.devices, self.spec.world_size),
            halves=self.clock.waits_for_norm,
            late=self.micro > 1 or self.clock.waits_for_norm,
        )
