"""Moves that make a schedule faster: exchange neighbours on its critical path, and put weight gradients into gaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshfold.pipeline.scheduling.actions import Action, Op
from meshfold.pipeline.scheduling.simulation import Replay, Result, Times, is_complete, peak_activations

Lists = list[list[Action]]
Replayed = tuple[Times, dict[Result, float]]
_SLACK = 1e-9


def makespan(replay: Replay, lists: Lists) -> float:
    """Return when the last action ends; infinity for a deadlock."""
    found = _run(replay, lists)
    return float("inf") if found is None else _value(found[0])[0]


def _run(replay: Replay, lists: Lists) -> Replayed | None:
    """Return the times of all actions and results, or None for a deadlock."""
    times, made = replay.run(lists)
    return (times, made) if is_complete(times, lists) else None


def _value(times: Times) -> tuple[float, float]:
    """Return the objective: the makespan, then the sum of the ranks' end times."""
    ends = [own[-1][1] for own in times if own]
    return max(ends), sum(ends)


def improve(replay: Replay, lists: Lists, limit: Sequence[float] | None, *, tries: int) -> Lists:
    """Improve by such moves until none helps, or ``tries`` moves have been tried; never worse than the start."""
    costs = replay.costs
    found = _run(replay, lists)
    if found is None:
        return lists
    best, value = lists, _value(found[0])
    seen: set[tuple[int, int, int]] = set()
    while tries > 0:
        better = None
        for rank, old, new in _moves(replay, best, found):
            if tries <= 0:
                break
            if (rank, old, new) in seen:
                continue
            tries -= 1
            seen.add((rank, old, new))
            own = list(best[rank])
            own.insert(new, own.pop(old))
            if limit is not None and peak_activations(own, costs.activation, costs.kept) > limit[rank] * (1 + _SLACK):
                continue
            other = [*best[:rank], own, *best[rank + 1 :]]
            result = _run(replay, other)
            if result is not None and _value(result[0]) < (value[0] - _SLACK * value[0], value[1]):
                better = other, result
                break
            if result is not None and _value(result[0]) < (value[0], value[1] - _SLACK * value[1]):
                better = other, result
                break
        if better is None:
            return best
        best, found = better
        value = _value(found[0])
        seen.clear()
    return best


def _moves(
    replay: Replay,
    lists: Lists,
    found: Replayed,
) -> Iterator[tuple[int, int, int]]:
    """Yield moves of an action to another position on its rank, along the critical path from the end."""
    times, made = found
    place = {action: (rank, i) for rank, actions in enumerate(lists) for i, action in enumerate(actions)}
    at: tuple[int, int] | None = max(
        ((rank, len(own) - 1) for rank, own in enumerate(times) if own),
        key=lambda one: times[one[0]][one[1]][1],
    )
    while at is not None:
        rank, i = at
        action, start = lists[rank][i], times[rank][i][0]
        source, delay, *_ = replay.facts(action)
        waited = (
            source is not None
            and made[source] + delay >= start - _SLACK
            and (i == 0 or times[rank][i - 1][1] < start - _SLACK)
        )
        if waited and source is not None:
            forward, stage, microbatch = source
            maker = Action(Op.F if forward else Op.B, stage, microbatch)
            at = place.get(maker) or place[Action(Op.BW, stage, microbatch)]
            continue
        if action.op is Op.W:
            yield from ((rank, i, gap) for gap in _gaps(times[rank], i))
        if i:
            before = lists[rank][i - 1]
            if (before.stage, before.microbatch) != (action.stage, action.microbatch):
                yield rank, i, i - 1
            if before.op is Op.W:
                yield from ((rank, i - 1, gap) for gap in _gaps(times[rank], i - 1))
        at = (rank, i - 1) if i else None


def _gaps(own: list[tuple[float, float]], place: int) -> Iterator[int]:
    """Yield the positions before actions that wait, and the last position."""
    count = 0
    for j in range(place + 1, len(own)):
        if own[j][0] > own[j - 1][1] + _SLACK:
            yield j - 1
            count += 1
            if count == 2:
                return
    if place < len(own) - 1:
        yield len(own) - 1


def fuse(replay: Replay, lists: Lists) -> Lists:
    """Fuse adjacent B and W into BW if that is not slower, since one pass for both gradients is cheaper."""
    found = _run(replay, lists)
    if found is None:
        return lists
    value = _value(found[0])[0]
    for rank in range(len(lists)):
        i = 0
        while i < len(lists[rank]) - 1:
            a, b = lists[rank][i : i + 2]
            if a.op is Op.B and b == Action(Op.W, a.stage, a.microbatch):
                own = [*lists[rank][:i], Action(Op.BW, a.stage, a.microbatch), *lists[rank][i + 2 :]]
                other = [*lists[:rank], own, *lists[rank + 1 :]]
                result = _run(replay, other)
                if result is not None and _value(result[0])[0] <= value * (1 + 1e-12):
                    lists = other
            i += 1
    return lists
