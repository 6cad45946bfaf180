"""A schedule on a clock: when every action begins and ends, how much time is idle, how many activations are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshfold.pipeline.errors import ScheduleError
from meshfold.pipeline.scheduling.actions import Action, Schedule
from meshfold.pipeline.scheduling.costs import Costs, Number, StageCosts
from meshfold.pipeline.scheduling.replay import Replay, is_complete, peak_activations


@dataclass(frozen=True, slots=True)
class Timed:
    """An action, where it runs, and from when to when."""

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
        """The longest span of a rank: time from step to step where no barrier stands between them."""
        return max(self.spans, default=0.0)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that is idle between a barrier before the step and one after it."""
        return self._idle(self.makespan)

    @property
    def span_bubble(self) -> float:
        """Share that is idle within the longest span: (cost - m (TF + TB + TW)) / cost of arXiv 2401.10241, section 5.3.

        It is what is lost where the ranks pass from step to step without waiting for each other.
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

    Every action begins as soon as the action before it on its rank is over and its inputs are there. What is sent
    takes its time on the way and none of the sender's or the receiver's.

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
    """:func:`simulate` with the costs in one object."""
    read = costs.for_stages(schedule.stages)
    times, _ = Replay(schedule.home, read).run(schedule.ranks)
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
