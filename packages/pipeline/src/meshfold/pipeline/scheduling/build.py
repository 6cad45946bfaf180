"""A schedule by its name, or by a function of one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshfold.mesh import did_you_mean
from meshfold.pipeline.errors import ScheduleError
from meshfold.pipeline.scheduling.actions import Action, Schedule
from meshfold.pipeline.scheduling.costs import Costs
from meshfold.pipeline.scheduling.schedules import SCHEDULES
from meshfold.pipeline.scheduling.search import auto
from meshfold.pipeline.scheduling.validation import check

Written = Schedule | str | Sequence[str | Iterable[Action | str]]
"""What a function of one's own may return: text, or for every rank its actions, as such or as text"""
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
        name: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, hanayo, dualpipe-v or auto; or a function that takes ``ranks``
            and ``microbatches``, and ``chunks`` and ``waves`` where they are given, and returns text or lists of actions.
        ranks: how many ranks stand in a row.
        microbatches: how many a step has; any number from 1.
        chunks: stages a rank holds; stages = ranks × chunks. For interleaved (2 if None), auto, and functions; the
            others have as many as they need.
        waves: of hanayo (1 if None): 2 chunks for every wave.
        costs: of the stages. ``auto`` searches with them, see :func:`meshfold.pipeline.search.auto`.
        memory: the most activations that a rank may hold at a time, in the unit of ``costs.activation``.

    Raises:
        ScheduleError: for a name that is not known, numbers that do not fit, a list of one's own that cannot run, and a
            schedule that holds more than ``memory``.
    """
    for what, value in (
        ("ranks", ranks),
        ("microbatches", microbatches),
        ("chunks", chunks),
        ("waves", waves),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ScheduleError(f"{what}={value!r} is no count. Give a whole number from 1.")
    if name == "auto":
        if waves is not None:
            raise ScheduleError(
                f"waves={waves} belongs to schedule 'hanayo'. Leave waves out, or name 'hanayo'."
            )
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
        made = (
            Schedule.of(read.ranks, name=name, microbatches=microbatches) if read.name == "custom" else read
        )
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
