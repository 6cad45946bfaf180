"""Moves that make a schedule faster: exchange neighbours on its critical path, and put weight gradients into gaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshfold.pipeline.scheduling.actions import Action, Op
from meshfold.pipeline.scheduling.costs import StageCosts
from meshfold.pipeline.scheduling.simulation import peak_of, source_of

Lists = list[list[Action]]
_SLACK = 1e-9


class Timing:
    """When every action of some lists begins and ends; the homes of the stages and the costs stay.

    The same arithmetic as :func:`meshfold.pipeline.simulate`'s, to the bit, with what does not change looked up once.
    """

    def __init__(self, home: Sequence[int], costs: StageCosts) -> None:
        self.home, self.costs = home, costs
        self.source: dict[Action, tuple[tuple[bool, int, int] | None, float, float]] = {}

    def facts(self, action: Action) -> tuple[tuple[bool, int, int] | None, float, float]:
        """What an action waits for, how long that is on the way, how long the action takes."""
        found = self.source.get(action)
        if found is None:
            source = source_of(action, len(self.home))
            delay = 0.0
            if source is not None and self.home[source[1]] != self.home[action.stage]:
                delay = self.costs.send[min(source[1], action.stage)]
            found = self.source[action] = (source, delay, self.costs.durations[action.stage][action.op])
        return found

    def run(
        self, lists: Lists
    ) -> tuple[list[list[tuple[float, float]]], dict[tuple[bool, int, int], float]] | None:
        """For every rank the begin and end of its actions, and when everything was made; None for lists that never end."""
        made: dict[tuple[bool, int, int], float] = {}
        times: list[list[tuple[float, float]]] = [[] for _ in lists]
        facts = self.facts
        moved = True
        while moved:
            moved = False
            for actions, own in zip(lists, times, strict=True):
                clock = own[-1][1] if own else 0.0
                for action in actions[len(own) :]:
                    source, delay, duration = facts(action)
                    if source is not None:
                        arrival = made.get(source)
                        if arrival is None:
                            break
                        if arrival + delay > clock:
                            clock = arrival + delay
                    own.append((clock, clock + duration))
                    clock += duration
                    if action.op is not Op.W:
                        made[action.op is Op.F, action.stage, action.microbatch] = clock
                    moved = True
        ended = all(len(own) == len(actions) for own, actions in zip(times, lists, strict=True))
        return (times, made) if ended else None


def makespan(clock: Timing, lists: Lists) -> float:
    """When the last action ends; infinite for lists that never end."""
    found = clock.run(lists)
    return float("inf") if found is None else _value(found[0])[0]


def _value(times: list[list[tuple[float, float]]]) -> tuple[float, float]:
    """What is made small: the makespan, then the sum of the ranks' ends."""
    ends = [own[-1][1] for own in times if own]
    return max(ends), sum(ends)


def improve(clock: Timing, lists: Lists, limit: Sequence[float] | None, *, tries: int) -> Lists:
    """Descend by such moves until none helps, or ``tries`` moves have been looked at; never worse than what it begins with."""
    costs = clock.costs
    found = clock.run(lists)
    if found is None:
        return lists
    best, value = lists, _value(found[0])
    seen: set[tuple[int, int, int]] = set()
    while tries > 0:
        better = None
        for rank, old, new in _moves(clock, best, found):
            if tries <= 0:
                break
            if (rank, old, new) in seen:
                continue
            tries -= 1
            seen.add((rank, old, new))
            own = list(best[rank])
            own.insert(new, own.pop(old))
            if limit is not None and peak_of(own, costs.activation, costs.kept) > limit[rank] * (1 + _SLACK):
                continue
            other = [*best[:rank], own, *best[rank + 1 :]]
            result = clock.run(other)
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
    clock: Timing,
    lists: Lists,
    found: tuple[list[list[tuple[float, float]]], dict[tuple[bool, int, int], float]],
) -> Iterator[tuple[int, int, int]]:
    """Moves of one action on its rank from one place to another, along the critical path from the end."""
    times, made = found
    place = {action: (rank, i) for rank, actions in enumerate(lists) for i, action in enumerate(actions)}
    at: tuple[int, int] | None = max(
        ((rank, len(own) - 1) for rank, own in enumerate(times) if own),
        key=lambda one: times[one[0]][one[1]][1],
    )
    while at is not None:
        rank, i = at
        action, start = lists[rank][i], times[rank][i][0]
        source, delay, _ = clock.facts(action)
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
    """Where an action would stand right in front of one that has to wait, or last."""
    count = 0
    for j in range(place + 1, len(own)):
        if own[j][0] > own[j - 1][1] + _SLACK:
            yield j - 1
            count += 1
            if count == 2:
                return
    if place < len(own) - 1:
        yield len(own) - 1


def fuse(clock: Timing, lists: Lists) -> Lists:
    """Make B and W that follow each other one BW wherever that is no slower: both gradients in one pass are cheaper to run."""
    found = clock.run(lists)
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
                result = clock.run(other)
                if result is not None and _value(result[0])[0] <= value * (1 + 1e-12):
                    lists = other
            i += 1
    return lists
