"""Turns a schedule into a program: inserts sends, receives, and the points at which gradients can be reduced.

Order. The schedule is simulated. An action gets its start time, a message the end time of the action that produces it, and every
rank gets its actions and messages in the order of these times. So all lists are parts of one global order in which a message comes
after its producer and before its consumer. So no rank waits forever, even if a send blocks until it is received. Everything before
the first unfinished step in the global order is done. Its rank (for a message, both ranks) has reached it and can run it. Messages
may also be posted several at once (a batch), or all early and waited for when used. No message is then posted later, so no rank
waits longer. :func:`prove` runs a program both ways and refuses one that does not end.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Literal

from meshfold.pipeline.errors import ScheduleError
from meshfold.pipeline.scheduling.actions import Action, Op, Schedule
from meshfold.pipeline.scheduling.costs import Costs
from meshfold.pipeline.scheduling.simulation import Result, result_of, simulate_costs, source_of
from meshfold.pipeline.scheduling.validation import check

Kind = Literal["activation", "gradient"]
_MESSAGE = re.compile(r"(?P<way>[<>])(?P<stage>\d+)(?P<op>[FB])(?P<microbatch>\d+)@(?P<peer>\d+)")
_REDUCE = re.compile(r"(?P<stage>\d+)R")


@dataclass(frozen=True, slots=True)
class Send:
    """Send what stage ``stage`` needs to rank ``peer``: its input (activation), or the gradient of its output.

    Prints as ``>2F0@1``: to rank 1, for 2F0; ``>1B0@0``: to rank 0, for 1B0 or 1BW0.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f">{_wanted(self)}@{self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive what stage ``stage``, which is on this rank, needs from rank ``peer``. Prints as ``<2F0@0``."""

    kind: Kind
    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"<{_wanted(self)}@{self.peer}"


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """The point after which the gradients of a stage's weights are complete and can be reduced. Prints as ``2R``."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}R"


Message = Send | Receive
Step = Action | Send | Receive | ReduceGradients


def _wanted(message: Message) -> str:
    return f"{message.stage}{'F' if message.kind == 'activation' else 'B'}{message.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A schedule with its communication: for every rank its steps in order.

    Attributes:
        schedule: the one it was made from.
        ranks: the steps. Steps of communication that follow each other may be posted together (:meth:`batches`).
    """

    schedule: Schedule
    ranks: tuple[tuple[Step, ...], ...]

    def batches(self, rank: int) -> Iterator[tuple[Message, ...] | Action | ReduceGradients]:
        """Yield the steps of a rank, with consecutive messages as one tuple: posted together, waited for together."""
        for together, steps in groupby(self.ranks[rank], lambda step: isinstance(step, Message)):
            if together:
                yield tuple(step for step in steps if isinstance(step, Message))
            else:
                yield from (step for step in steps if not isinstance(step, Message))

    def __str__(self) -> str:
        lines = (" ".join([f"rank {rank}:", *map(str, steps)]) for rank, steps in enumerate(self.ranks))
        return "\n".join([str(self.schedule).splitlines()[0], *lines])

    @classmethod
    def parse(cls, text: str) -> Program:
        """Parse the output of ``str``; the schedule is what remains without communication.

        Raises:
            ScheduleError: for text that is not a program.
        """
        head, *lines = text.strip().splitlines()
        steps = tuple(tuple(map(parse_step, line.partition(":")[2].split())) for line in lines)
        actions = ([str(step) for step in one if isinstance(step, Action)] for one in steps)
        plain = [" ".join([f"rank {rank}:", *own]) for rank, own in enumerate(actions)]
        return cls(schedule=Schedule.parse("\n".join([head, *plain])), ranks=steps)


def parse_step(text: str) -> Step:
    """Read ``2F0``, ``>2F0@1``, ``<1B0@1`` or ``2R``.

    Raises:
        ScheduleError: for anything else.
    """
    message = _MESSAGE.fullmatch(text)
    if message is not None:
        way = Send if message["way"] == ">" else Receive
        kind: Kind = "activation" if message["op"] == "F" else "gradient"
        return way(kind, int(message["stage"]), int(message["microbatch"]), int(message["peer"]))
    reduce = _REDUCE.fullmatch(text)
    return ReduceGradients(int(reduce["stage"])) if reduce else Action.parse(text)


def communicate(schedule: Schedule, costs: Costs | None = None) -> Program:
    """Insert sends, receives and the points at which gradients are complete.

    A send comes right after the action that produces its tensors. Its receive comes where the receiver is at that time under the
    ``costs`` (all equal if None). This costs the least time on ranks that wait for messages at once. Neighbours on one rank need
    neither. ``ReduceGradients`` comes after the last action on the weights of a stage.

    Raises:
        ScheduleError: if the schedule cannot run; the message is that of :func:`meshfold.pipeline.check`.
    """
    check(schedule)
    depth = simulate_costs(schedule, Costs())  # increases along every dependency, even at zero cost
    timed = depth if costs is None else simulate_costs(schedule, costs)
    last = {action.stage: action for own in schedule.ranks for action in own if action.finishes_weights}
    order: list[tuple[float, float, int, Step]] = []  # time, depth, rank, step
    for rank, (own, levels) in enumerate(zip(timed.ranks, depth.ranks, strict=True)):
        for one, level in zip(own, levels, strict=True):
            order.append((one.start, level.start, rank, one.action))
            pair = messages_of(one.action, schedule)
            if pair is not None:
                at, (send, receive) = level.start + 0.25, pair
                order += [(one.end, at, rank, send), (one.end, at, send.peer, receive)]
            if last.get(one.action.stage) == one.action:
                order.append((one.end, level.start + 0.5, rank, ReduceGradients(one.action.stage)))
    lists: list[list[Step]] = [[] for _ in schedule.ranks]
    for _, _, rank, step in sorted(order, key=lambda entry: entry[:2]):
        lists[rank].append(step)
    program = Program(schedule=schedule, ranks=tuple(map(tuple, lists)))
    prove(program)
    return program


def messages_of(action: Action, schedule: Schedule) -> tuple[Send, Receive] | None:
    """Return the send and the receive that an action causes; None if nothing leaves the rank."""
    kind: Kind = "activation" if action.op is Op.F else "gradient"
    stage = action.stage + (1 if action.op is Op.F else -1)
    if action.op is Op.W or not 0 <= stage < schedule.stages:
        return None
    here, there = schedule.stage_ranks[action.stage], schedule.stage_ranks[stage]
    if here == there:
        return None
    return Send(kind, stage, action.microbatch, there), Receive(kind, stage, action.microbatch, here)


def prove(program: Program) -> None:
    """Run a program without tensors, once with messages that block one by one and once with messages in batches.

    Raises:
        ScheduleError: if a message has no partner, if an action runs before its input is received, or if ranks
            deadlock.
    """
    _paired(program)
    _inputs(program)
    _ends(program, [[(step,) for step in steps] for steps in program.ranks], "one after the other")
    batched: list[list[tuple[Step, ...]]] = [
        [steps if isinstance(steps, tuple) else (steps,) for steps in program.batches(rank)]
        for rank in range(len(program.ranks))
    ]
    _ends(program, batched, "in batches")


def _paired(program: Program) -> None:
    """Check that every message has one partner, and that two ranks exchange messages in the same order."""
    sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, steps in enumerate(program.ranks):
        for step in steps:
            match step:
                case Send(kind, stage, microbatch, peer):
                    sent[rank, peer].append(Receive(kind, stage, microbatch, rank))
                case Receive():
                    received[step.peer, rank].append(step)
    for source, target in sorted(sent.keys() | received.keys()):
        for there, here in zip_longest(sent[source, target], received[source, target]):
            if there != here:
                raise ScheduleError(
                    f"program {program.schedule.name!r}: rank {source} sends {_named(there)} to rank {target}, which "
                    f"receives {_named(here)} at that position. Send and receive the same, in the same order."
                )


def _named(message: Message | None) -> str:
    return "nothing" if message is None else _wanted(message)


def _inputs(program: Program) -> None:
    """Check that the inputs of every action and the contents of every message exist in time."""
    schedule = program.schedule
    for rank, steps in enumerate(program.ranks):
        there: set[Result] = set()  # results that the rank has made or received
        for step in steps:
            match step:
                case Receive():
                    there.add(_carried(step))
                    continue
                case ReduceGradients():
                    continue
                case Send():
                    needed: Result | None = _carried(step)
                case Action():
                    needed, made = source_of(step, schedule.stages), result_of(step)
                    if made is not None:
                        there.add(made)
            if needed is not None and needed not in there:
                maker = Action(Op.F if needed[0] else Op.B, *needed[1:])
                raise ScheduleError(
                    f"program {schedule.name!r}: rank {rank} has {step} before it has what {maker} makes. "
                    f"Put {step} after it, or after its receive."
                )


def _carried(message: Message) -> Result:
    """Return the result that a message carries."""
    forward = message.kind == "activation"
    return forward, message.stage + (-1 if forward else 1), message.microbatch


def _ends(program: Program, ranks: list[list[tuple[Step, ...]]], how: str) -> None:
    """Simulate batches: a batch ends once the partners of all of its messages are posted."""
    at = [0] * len(ranks)
    posted: set[tuple[int, Message]] = set()

    def post(rank: int) -> None:
        if at[rank] < len(ranks[rank]):
            posted.update((rank, step) for step in ranks[rank][at[rank]] if isinstance(step, Message))

    def over(rank: int) -> bool:
        return all(
            (step.peer, _partner(step, rank)) in posted for step in ranks[rank][at[rank]] if isinstance(step, Message)
        )

    for rank in range(len(ranks)):
        post(rank)
    moved = True
    while moved:
        moved = False
        for rank, batches in enumerate(ranks):
            while at[rank] < len(batches) and over(rank):
                at[rank] += 1
                post(rank)
                moved = True
    stuck = [rank for rank, batches in enumerate(ranks) if at[rank] < len(batches)]
    if stuck:
        where = ", ".join(f"rank {rank} at {' '.join(map(str, ranks[rank][at[rank]]))}" for rank in stuck)
        raise ScheduleError(
            f"program {program.schedule.name!r}: with messages {how} these ranks wait for each other forever: {where}. "
            f"Put sends and receives into the order of communicate(schedule)."
        )


def _partner(message: Message, rank: int) -> Message:
    other = Receive if isinstance(message, Send) else Send
    return other(message.kind, message.stage, message.microbatch, rank)
