"""Replays lists of actions in the order of their dependencies: when each action begins and ends, where ranks wait for ever."""

from __future__ import annotations

from collections.abc import Sequence

from meshfold.pipeline.scheduling.actions import Action, Op
from meshfold.pipeline.scheduling.costs import StageCosts

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
    """Runs lists of actions under given costs. What does not depend on their order is looked up once.

    Every action begins as soon as the action before it on its rank is over and its input has arrived.
    """

    def __init__(self, home: Sequence[int], costs: StageCosts) -> None:
        """Args:
        home: the rank of every stage.
        costs: of every stage.
        """
        self.home, self.costs = home, costs
        self._facts: dict[Action, tuple[Result | None, float, float, Result | None]] = {}

    def facts(self, action: Action) -> tuple[Result | None, float, float, Result | None]:
        """Return what an action waits for, how long that travels, how long the action takes, and what it makes."""
        found = self._facts.get(action)
        if found is None:
            source = source_of(action, len(self.home))
            delay = 0.0
            if source is not None and self.home[source[1]] != self.home[action.stage]:
                delay = self.costs.send[min(source[1], action.stage)]
            duration = self.costs.durations[action.stage][action.op]
            found = self._facts[action] = (source, delay, duration, result_of(action))
        return found

    def run(self, lists: Sequence[Sequence[Action]]) -> tuple[Times, dict[Result, float]]:
        """Run lists as far as they can run.

        Returns:
            The times of the actions that ran, and when each result was made. Where a rank has fewer times than actions, it waits
            for ever in front of the next one.
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
    """Return whether all actions ran."""
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
