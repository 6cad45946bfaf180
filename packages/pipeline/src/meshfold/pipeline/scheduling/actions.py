"""Schedules as data: actions, and for every rank the list of its actions in order. Both print and parse as text.

``2F0`` is the forward of stage 2 on micro-batch 0. A rank runs its list from left to right; what crosses ranks is inserted
by :func:`meshfold.pipeline.communicate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain

from meshfold.mesh import with_old_names
from meshfold.pipeline.errors import ScheduleError

_ACTION = re.compile(r"(?P<stage>\d+)(?P<op>F|BW|B|W)(?P<microbatch>\d+)")
_HEAD = re.compile(
    r"(?P<name>.+?): (?P<ranks>\d+) ranks?, (?P<microbatches>\d+) micro-batch(?:es)?, stages on (?P<stage_ranks>[\d ]+)"
)
_LINE = re.compile(r"rank (?P<rank>\d+):(?P<rest>.*)")


class Op(StrEnum):
    """Operation of an action: forward, gradient of the input, gradient of the weights, or both gradients at once."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of one stage on one micro-batch. Prints as ``2F0``: stage, operation, micro-batch."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @property
    def finishes_weights(self) -> bool:
        """True for W and BW, which make the gradient of the stage's weights."""
        return self.op in (Op.W, Op.BW)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``2F0``.

        Raises:
            ScheduleError: for anything else.
        """
        found = _ACTION.fullmatch(text)
        if found is None:
            raise ScheduleError(
                f"{text!r} is not an action. Write stage, operation (F, B, W or BW) and micro-batch, as in '2F0'."
            )
        return cls(Op(found["op"]), int(found["stage"]), int(found["microbatch"]))


@with_old_names({"home": "stage_ranks"}, arguments={"home": "stage_ranks"})
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A list of actions for every rank, in order.

    Attributes:
        name: of the schedule.
        microbatches: number in a step.
        stage_ranks: the rank of every stage.
        ranks: for every rank its actions in order. A rank without a stage has none.

    Nothing is checked here: :func:`meshfold.pipeline.check` names the mistakes of a list.
    """

    name: str
    microbatches: int
    stage_ranks: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_ranks)

    @cached_property
    def chunks(self) -> int:
        """The most stages that one rank holds."""
        return max((self.stage_ranks.count(rank) for rank in range(len(self.ranks))), default=0)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order."""
        return tuple(stage for stage, at in enumerate(self.stage_ranks) if at == rank)

    def __str__(self) -> str:
        many = (
            "rank" if len(self.ranks) == 1 else "ranks",
            "micro-batch" if self.microbatches == 1 else "micro-batches",
        )
        where = " ".join(map(str, self.stage_ranks))
        head = f"{self.name}: {len(self.ranks)} {many[0]}, {self.microbatches} {many[1]}, stages on {where}"
        lines = (" ".join([f"rank {rank}:", *map(str, actions)]) for rank, actions in enumerate(self.ranks))
        return "\n".join([head, *lines])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the output of ``str``, or only its lines of actions, one per rank.

        Without the first line the rank of a stage is the rank that lists it first, and the micro-batches are those
        that are listed. ``rank 0:`` may be left out.

        Raises:
            ScheduleError: for text that is not a schedule; the message quotes it.
        """
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        head = _HEAD.fullmatch(lines[0]) if lines else None
        if head is None:
            return cls.of([_actions(line, rank) for rank, line in enumerate(lines)])
        ranks = [_actions(line, rank) for rank, line in enumerate(lines[1:])]
        if len(ranks) != int(head["ranks"]):
            raise ScheduleError(
                f"{lines[0]!r} says {head['ranks']} ranks, and {len(ranks)} lines follow. Write one line for every rank."
            )
        stage_ranks = tuple(map(int, head["stage_ranks"].split()))
        name, microbatches = head["name"], int(head["microbatches"])
        return cls(name=name, microbatches=microbatches, stage_ranks=stage_ranks, ranks=tuple(map(tuple, ranks)))

    @classmethod
    def of(
        cls,
        ranks: Sequence[str | Iterable[Action | str]],
        *,
        name: str = "custom",
        microbatches: int | None = None,
    ) -> Schedule:
        """Make a schedule from one list for every rank: of actions, of their texts, or one text.

        Args:
            ranks: the lists. The rank of a stage is the rank that lists it first.
            name: what to call it.
            microbatches: how many a step has; None: those that are listed.

        Raises:
            ScheduleError: for text that is not an action, and for a stage that no rank lists although a later one is listed.
        """
        read = tuple(tuple(_actions(actions, rank)) for rank, actions in enumerate(ranks))
        stage_ranks: dict[int, int] = {}
        for rank, actions in enumerate(read):
            for action in actions:
                stage_ranks.setdefault(action.stage, rank)
        missing = sorted(set(range(max(stage_ranks, default=-1) + 1)) - stage_ranks.keys())
        if missing:
            raise ScheduleError(
                f"schedule {name!r}: stage {missing[0]} is on no rank, stage {max(stage_ranks)} is. "
                f"Give stage {missing[0]} to a rank, or number the stages from 0 without a gap."
            )
        if microbatches is None:
            microbatches = 1 + max((action.microbatch for action in chain.from_iterable(read)), default=-1)
        return cls(
            name=name,
            microbatches=microbatches,
            stage_ranks=tuple(stage_ranks[stage] for stage in range(len(stage_ranks))),
            ranks=read,
        )


def _actions(given: str | Iterable[Action | str], rank: int) -> list[Action]:
    """Parse a rank's list of actions from any supported form."""
    if isinstance(given, str):
        line = _LINE.fullmatch(given.strip())
        if line is not None and int(line["rank"]) != rank:
            raise ScheduleError(
                f"{given.strip()[:60]!r} is where rank {rank} should be. Write the ranks in order from 0."
            )
        given = (line["rest"] if line else given).split()
    return [Action.parse(one) if isinstance(one, str) else one for one in given]
