"""Schedules by name or by a custom function, and the programs of a pipeline made from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from meshfold.mesh import SpecError, did_you_mean
from meshfold.pipeline.errors import ScheduleError
from meshfold.pipeline.scheduling.actions import Action, Op, Schedule
from meshfold.pipeline.scheduling.communication import Program, Step, communicate, messages_of
from meshfold.pipeline.scheduling.costs import Costs
from meshfold.pipeline.scheduling.schedules import SCHEDULES
from meshfold.pipeline.scheduling.search import auto
from meshfold.pipeline.scheduling.validation import check

Written = Schedule | str | Sequence[str | Iterable[Action | str]]
"""Result of a custom function: text, or for every rank its actions, as objects or as text"""
_TAKES = {"interleaved": "chunks", "hanayo": "waves"}
_CHUNKS = {"zb-v": 2, "dualpipe-v": 2}


def schedule(
    name: str | Callable[..., Written],
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    waves: int | None = None,
    costs: Costs | Mapping[int, Costs] | None = None,
    memory: float | Sequence[float] | None = None,
) -> Schedule:
    """Make a schedule: the list of actions of every rank.

    Args:
        name: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, hanayo, dualpipe-v or auto; or a function that takes ``ranks``,
            ``microbatches``, and ``chunks`` and ``waves`` if given, and returns text or lists of actions.
        ranks: number of ranks.
        microbatches: how many a step has; any number from 1.
        chunks: stages a rank holds; stages = ranks × chunks. For interleaved (2 if None), auto, and functions; the other schedules
            fix it.
        waves: of hanayo (1 if None): 2 chunks for every wave.
        costs: of the stages. ``auto`` searches with them, see :func:`meshfold.pipeline.search.auto`.
        memory: the most activations that a rank may hold at a time, in the unit of ``costs.activation``.

    Raises:
        ScheduleError: for an unknown name, numbers that do not fit, a custom list that cannot run, or a schedule that holds more
            than ``memory``.
    """
    for what, value in (
        ("ranks", ranks),
        ("microbatches", microbatches),
        ("chunks", chunks),
        ("waves", waves),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ScheduleError(f"{what}={value!r} is not a count. Give a whole number from 1.")
    if name == "auto":
        if waves is not None:
            raise ScheduleError(f"waves={waves} belongs to schedule 'hanayo'. Leave waves out, or name 'hanayo'.")
        return auto(ranks=ranks, microbatches=microbatches, chunks=chunks, costs=costs, memory=memory)
    made = (
        _named(name, ranks, microbatches, chunks, waves)
        if isinstance(name, str)
        else _own(name, ranks, microbatches, chunks, waves)
    )
    if not isinstance(name, str) or memory is not None:
        known = costs.get(made.chunks) if isinstance(costs, Mapping) else costs
        check(made, memory=memory, costs=known)
    return made


def _named(name: str, ranks: int, microbatches: int, chunks: int | None, waves: int | None) -> Schedule:
    if name not in SCHEDULES:
        known = [*SCHEDULES, "auto"]
        raise ScheduleError(
            f"schedule {name!r} is not known.{did_you_mean(name, known)} Known are {', '.join(known)}; or give a function."
        )
    takes = _TAKES.get(name)
    if waves is not None and takes != "waves":
        raise ScheduleError(
            f"waves={waves} belongs to schedule 'hanayo', and the schedule is {name!r}. Leave waves out."
        )
    fixed = 2 * (waves or 1) if takes == "waves" else _CHUNKS.get(name, 1)
    if chunks is not None and takes != "chunks" and chunks != fixed:
        raise ScheduleError(
            f"under schedule {name!r} a rank holds {fixed} stages, not chunks={chunks}. Leave chunks out"
            + (f", or write waves={max(chunks // 2, 1)}." if takes == "waves" else ", or name 'interleaved'.")
        )
    options = {key: value for key, value in (("chunks", chunks), ("waves", waves)) if key == takes and value}
    lists = SCHEDULES[name](ranks=ranks, microbatches=microbatches, **options)
    return Schedule.of(lists, name=name, microbatches=microbatches)


def _own(
    function: Callable[..., Written], ranks: int, microbatches: int, chunks: int | None, waves: int | None
) -> Schedule:
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    given = {key: value for key, value in (("chunks", chunks), ("waves", waves)) if value is not None}
    arguments = {"ranks": ranks, "microbatches": microbatches, **given}
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ScheduleError(
            f"schedule {name!r} is called with {', '.join(f'{key}={value}' for key, value in arguments.items())}, and its "
            f"signature does not take that: {error}. Write it as def {name}({', '.join(arguments)})."
        ) from error
    written = function(**arguments)
    if isinstance(written, Schedule):
        made = written
    elif isinstance(written, str):
        read = Schedule.parse(written)
        made = Schedule.of(read.ranks, name=name, microbatches=microbatches) if read.name == "custom" else read
    else:
        made = Schedule.of(written, name=name, microbatches=microbatches)
    for what, wanted, has in (
        ("ranks", ranks, len(made.ranks)),
        ("micro-batches", microbatches, made.microbatches),
    ):
        if wanted != has:
            raise ScheduleError(
                f"schedule {name!r} was asked for {wanted} {what} and returned {has}. Return one list for every rank, "
                "with every micro-batch."
            )
    return made


Source = str | Schedule | Callable[..., Written]
"""a schedule by name, a schedule, or a custom function"""


class Programs:
    """Programs of a pipeline, with gradients and without, for each number of micro-batches that its batches have.

    Each is made when it is first asked for; all have the same stages on the same ranks.

    Attributes:
        stage_ranks: the rank of every stage.
    """

    def __init__(
        self,
        source: Source,
        ranks: int,
        microbatches: int | None,
        *,
        chunks: int | None = None,
        waves: int | None = None,
        costs: Costs | Mapping[int, Costs] | None = None,
        memory: float | Sequence[float] | None = None,
    ) -> None:
        """Args:
            source: of the schedules.
            ranks: of the pipeline axis.
            microbatches: in a step, if the batch has as many rows.
            chunks, waves, costs, memory: as :func:`meshfold.pipeline.schedule` takes them.

        Raises:
            ScheduleError: for a schedule that cannot be made or run.
            SpecError: for one that is made for other ranks or micro-batches.
        """
        if microbatches is not None and (isinstance(microbatches, bool) or microbatches < 1):
            raise SpecError(f"microbatches={microbatches!r}: give a whole number from 1 up")
        self._source, self._ranks, self._microbatches = source, ranks, microbatches
        self._options: dict[str, Any] = dict(chunks=chunks, waves=waves, costs=costs, memory=memory)
        self._known: dict[tuple[int, bool], Program] = {}
        self._fixed: int | None = None
        if isinstance(source, Schedule):
            check(source)
            if len(source.ranks) != ranks:
                raise SpecError(
                    f"schedule {source.name!r} is for {len(source.ranks)} ranks, and the pipeline has {ranks}"
                )
            if microbatches not in (None, source.microbatches):
                raise SpecError(
                    f"microbatches={microbatches} and a schedule of {source.microbatches}: leave microbatches out"
                )
            self._fixed = source.microbatches
        first = self._make(microbatches or self._fixed or 2 * ranks)
        self.stage_ranks = first.stage_ranks
        if source == "auto":  # keep this cut for other numbers of micro-batches
            self._options.update(chunks=first.chunks, stage_ranks=first.stage_ranks)

    def count(self, rows: int, *, training: bool = True, unit: int = 1) -> int:
        """Return the number of micro-batches for a batch of ``rows`` rows; ``unit``: rows that should stay together."""
        if self._fixed is not None:
            return self._fixed if training else min(self._fixed, rows)
        if self._microbatches is not None:
            return min(self._microbatches, rows)
        ranks, groups = self._ranks, -(-rows // unit)
        return next((m for m in range(ranks, groups + 1, ranks) if groups % m == 0), min(ranks, groups))

    def training(self, microbatches: int) -> Program:
        """Return the program of forwards and backwards.

        Raises:
            SpecError: if the schedule for this number of micro-batches has its stages on other ranks.
        """
        known = self._known.get((microbatches, True))
        if known is None:
            made = self._make(microbatches)
            if made.stage_ranks != self.stage_ranks or made.microbatches != microbatches:
                raise SpecError(
                    f"schedule {made.name!r} of {microbatches} micro-batches has its stages on ranks "
                    f"{' '.join(map(str, made.stage_ranks))} and {made.microbatches} micro-batches, where the model was cut for "
                    f"stages on {' '.join(map(str, self.stage_ranks))}: a schedule keeps the ranks of its stages"
                )
            known = self._known[microbatches, True] = communicate(made)
        return known

    def replan(self, costs: Costs) -> None:
        """Search the orders of ``auto`` again, for these costs; stages stay on their ranks.

        Raises:
            SpecError: for another schedule than ``auto``.
        """
        if self._source != "auto":
            raise SpecError(f"costs do not affect schedule {self._source!r}: only 'auto' uses them")
        self._options["costs"] = costs
        self._known = {key: known for key, known in self._known.items() if not key[1]}

    def forward(self, microbatches: int) -> Program:
        """Return the program of the forwards alone."""
        known = self._known.get((microbatches, False))
        if known is None:
            known = self._known[microbatches, False] = forwards(self.stage_ranks, self._ranks, microbatches)
        return known

    def _make(self, microbatches: int) -> Schedule:
        if isinstance(self._source, Schedule):
            return self._source
        options = {key: value for key, value in self._options.items() if value is not None}
        if "stage_ranks" in options:
            return auto(ranks=self._ranks, microbatches=microbatches, **options)
        return schedule(self._source, ranks=self._ranks, microbatches=microbatches, **options)


def forwards(stage_ranks: Sequence[int], ranks: int, microbatches: int) -> Program:
    """Return a program of forwards only, in waves: stage s runs micro-batch i at time s + i."""
    waves = sorted((stage + i, stage, i) for stage in range(len(stage_ranks)) for i in range(microbatches))
    order = [Action(Op.F, stage, i) for _, stage, i in waves]
    lists = tuple(tuple(action for action in order if stage_ranks[action.stage] == rank) for rank in range(ranks))
    plan = Schedule(name="forward", microbatches=microbatches, stage_ranks=tuple(stage_ranks), ranks=lists)
    steps: list[list[Step]] = [[] for _ in range(ranks)]
    for action in order:
        steps[stage_ranks[action.stage]].append(action)
        pair = messages_of(action, plan)
        if pair is not None:
            send, receive = pair
            steps[stage_ranks[action.stage]].append(send)
            steps[send.peer].append(receive)
    return Program(schedule=plan, ranks=tuple(map(tuple, steps)))
