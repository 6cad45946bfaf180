"""Simulation of a schedule: when every action begins and ends, which ranks deadlock, idle time, activations held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshfold.pipeline.errors import ScheduleError
from meshfold.pipeline.scheduling.actions import Action, Op, Schedule
from meshfold.pipeline.scheduling.costs import Costs, Number, StageCosts

Result = tuple[bool, int, int]
"""(made by a forward, stage, micro-batch): an output of a stage, or the gradient of its input"""
Times = list[list[tuple[float, float]]]
"""by rank: begin and end of its actions, in order"""


def source_of(action: Action, stages: int) -> Result | None:
    """Return the result that an action waits for; None for a forward of the first stage."""
    match action.op:
        case Op.F:
            return (True, action.stage - 1, action.microbatch) if action.stage else None
        case Op.W:
            return (False, action.stage, action.microbatch)
        case _ if action.stage == stages - 1:
            return (True, action.stage, action.microbatch)
        case _:
            return (False, action.stage + 1, action.microbatch)


def result_of(action: Action) -> Result | None:
    """Return the result of an action that others wait for; None for W."""
    return None if action.op is Op.W else (action.op is Op.F, action.stage, action.microbatch)


class Replay:
    """Runs lists of actions under given costs. Everything that does not depend on their order is computed once.

    Every action begins as soon as the action before it on its rank is over and its input has arrived.
    """

    def __init__(self, stage_ranks: Sequence[int], costs: StageCosts) -> None:
        """Args:
        stage_ranks: the rank of every stage.
        costs: of every stage.
        """
        self.stage_ranks, self.costs = stage_ranks, costs
        self._facts: dict[Action, tuple[Result | None, float, float, Result | None]] = {}

    def facts(self, action: Action) -> tuple[Result | None, float, float, Result | None]:
        """Return what an action waits for, its transfer time, the action's duration, and its result."""
        found = self._facts.get(action)
        if found is None:
            source = source_of(action, len(self.stage_ranks))
            delay = 0.0
            if source is not None and self.stage_ranks[source[1]] != self.stage_ranks[action.stage]:
                delay = self.costs.send[min(source[1], action.stage)]
            duration = self.costs.durations[action.stage][action.op]
            found = self._facts[action] = (source, delay, duration, result_of(action))
        return found

    def run(self, lists: Sequence[Sequence[Action]]) -> tuple[Times, dict[Result, float]]:
        """Run lists as far as they can run.

        Returns:
            The times of the actions that ran, and when each result was made. A rank with fewer times than actions waits
            forever for the next one.
        """
        made: dict[Result, float] = {}
        waiting: dict[Result, list[int]] = {}
        times: Times = [[] for _ in lists]
        ready = list(range(len(lists)))
        while ready:
            rank = ready.pop()
            actions, own = lists[rank], times[rank]
            clock = own[-1][1] if own else 0.0
            for place in range(len(own), len(actions)):
                source, delay, duration, result = self.facts(actions[place])
                if source is not None:
                    arrival = made.get(source)
                    if arrival is None:
                        waiting.setdefault(source, []).append(rank)
                        break
                    clock = max(clock, arrival + delay)
                begin, clock = clock, clock + duration
                own.append((begin, clock))
                if result is not None:
                    made[result] = clock
                    if result in waiting:
                        ready += waiting.pop(result)
        return times, made


def is_complete(times: Times, lists: Sequence[Sequence[Action]]) -> bool:
    """Return True if all actions ran."""
    return all(len(own) == len(actions) for own, actions in zip(times, lists, strict=True))


def peak_activations(actions: Sequence[Action], activation: Sequence[float], kept: Sequence[float]) -> float:
    """Return the most activations that are held at a time when these actions run in this order; arguments as of :class:`Costs`."""
    held = most = 0.0
    for action in actions:
        size, share = activation[action.stage], kept[action.stage]
        match action.op:
            case Op.F:
                held += size
                most = max(most, held)
            case Op.B:
                held -= size * (1 - share)
            case Op.W:
                held -= size * share
            case Op.BW:
                held -= size
    return most


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its rank, start and end."""

    action: Action
    rank: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The times and memory of a schedule under given costs.

    Attributes:
        schedule: what ran.
        costs: under which costs.
        ranks: for every rank its actions in order, with their times. The first action of all begins at 0.
    """

    schedule: Schedule
    costs: StageCosts
    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the beginning of the first action of all to the end of the last: a step between two barriers."""
        return max((timed[-1].end for timed in self.ranks if timed), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that every rank computes."""
        return tuple(sum(one.end - one.start for one in timed) for timed in self.ranks)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Time from the beginning of a rank's own first action to the end of its last, for every rank."""
        return tuple(timed[-1].end - timed[0].start if timed else 0.0 for timed in self.ranks)

    @property
    def longest_span(self) -> float:
        """The longest span of a rank: time from step to step without a barrier between them."""
        return max(self.spans, default=0.0)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that is idle between a barrier before the step and one after it."""
        return self._idle(self.makespan)

    @property
    def span_bubble(self) -> float:
        """Share that is idle within the longest span: (cost - m (TF + TB + TW)) / cost of arXiv 2401.10241, section 5.3.

        It is the loss if ranks go from step to step without waiting for each other.
        """
        return self._idle(self.longest_span)

    def _idle(self, time: float) -> float:
        return 1 - sum(self.busy) / (len(self.ranks) * time) if time else 0.0

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The most activations that every rank holds at a time, in the unit of ``activation``.

        F allocates when it begins, B frees all but the share ``kept`` when it ends, W and BW free the rest.
        """
        return tuple(
            peak_activations([one.action for one in timed], self.costs.activation, self.costs.kept)
            for timed in self.ranks
        )

    @cached_property
    def peak_microbatches(self) -> tuple[int, ...]:
        """The most pairs of stage and micro-batch that every rank holds from F to the gradient of the weights."""
        return tuple(peak_microbatches([one.action for one in timed]) for timed in self.ranks)

    def _repr_svg_(self) -> str:
        """Return the picture as SVG, which Jupyter shows."""
        from meshfold.pipeline.scheduling.drawing import svg

        return svg(self)

    def __str__(self) -> str:
        lines = [
            f"{self.schedule.name}: {self.makespan:.4g} with a barrier after the step, bubble {self.bubble:.1%}; "
            f"{self.longest_span:.4g} in the longest span of a rank, bubble {self.span_bubble:.1%}",
            "rank   begins     ends     busy   activations at most",
        ]
        for rank, timed in enumerate(self.ranks):
            start, end = (timed[0].start, timed[-1].end) if timed else (0.0, 0.0)
            lines.append(f"{rank:4} {start:8.4g} {end:8.4g} {self.busy[rank]:8.4g}   {self.peak[rank]:.4g}")
        return "\n".join(lines)


def simulate(
    schedule: Schedule,
    forward: Number = 1.0,
    backward_input: Number = 1.0,
    backward_weight: Number = 1.0,
    send: Number = 0.0,
    *,
    backward: Number | None = None,
    activation: Number = 1.0,
    kept: Number = 1.0,
) -> Simulation:
    """Run a schedule on a clock. The arguments are those of :class:`Costs`.

    Every action begins as soon as the action before it on its rank is over and its inputs have arrived. Transfers take
    time, but none of the sender's or the receiver's.

    Raises:
        ScheduleError: for costs that do not fit the stages, and for a schedule that can never end.
    """
    return simulate_costs(
        schedule,
        Costs(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            send=send,
            backward=backward,
            activation=activation,
            kept=kept,
        ),
    )


def simulate_costs(schedule: Schedule, costs: Costs) -> Simulation:
    """Call :func:`simulate` with the costs in one object."""
    read = costs.for_stages(schedule.stages)
    times, _ = Replay(schedule.stage_ranks, read).run(schedule.ranks)
    if not is_complete(times, schedule.ranks):
        where = ", ".join(
            f"rank {rank} at {actions[len(own)]}"
            for rank, (own, actions) in enumerate(zip(times, schedule.ranks, strict=True))
            if len(own) < len(actions)
        )
        raise ScheduleError(
            f"schedule {schedule.name!r} never ends: {where} wait for inputs. check(schedule) says what to change."
        )
    timed = (
        tuple(Timed(action, rank, *span) for action, span in zip(actions, own, strict=True))
        for rank, (own, actions) in enumerate(zip(times, schedule.ranks, strict=True))
    )
    return Simulation(schedule=schedule, costs=read, ranks=tuple(timed))


def peak_microbatches(actions: Sequence[Action]) -> int:
    """Return the most pairs of stage and micro-batch that are between F and the gradient of the weights, in this order."""
    ones = (1.0,) * (1 + max((action.stage for action in actions), default=0))
    return round(peak_activations(actions, ones, ones))
