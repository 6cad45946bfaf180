"""Schedules for tests: all named ones, random valid lists, and an oracle that judges lists by another way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from random import Random

from meshfold.pipeline import Action, Op, Schedule, schedule

NAMED: tuple[tuple[str, dict[str, int]], ...] = (
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved", dict(chunks=2)),
    ("interleaved", dict(chunks=3)),
    ("zb-h1", {}),
    ("zb-h2", {}),
    ("zb-v", {}),
    ("hanayo", dict(waves=1)),
    ("hanayo", dict(waves=2)),
    ("hanayo", dict(waves=4)),
    ("dualpipe-v", {}),
)


def named(name: str, ranks: int, microbatches: int, options: dict[str, int]) -> Schedule:
    return schedule(
        name, ranks=ranks, microbatches=microbatches, chunks=options.get("chunks"), waves=options.get("waves")
    )


def some_counts(ranks: int) -> list[int]:
    """Fewer micro-batches than ranks, as many, not divisible, many."""
    return sorted({1, 2, 3, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1})


def needs(schedule: Schedule) -> dict[Action, set[Action]]:
    """What must be over before every action, apart from the order on its rank."""
    there = {action for actions in schedule.ranks for action in actions}
    found: dict[Action, set[Action]] = {}
    for a in there:
        gradients = [Action(op, a.stage + 1, a.microbatch) for op in (Op.B, Op.BW)]
        own = Action(Op.F, a.stage, a.microbatch)
        wanted = {
            Op.F: [Action(Op.F, a.stage - 1, a.microbatch)],
            Op.B: [own, *gradients],
            Op.BW: [own, *gradients],
            Op.W: [Action(Op.B, a.stage, a.microbatch)],
        }[a.op]
        found[a] = {one for one in wanted if one in there}
    return found


def is_valid(schedule: Schedule) -> bool:
    """Whether every action is there once and a topological order of all exists: the oracle."""
    count = Counter(action for actions in schedule.ranks for action in actions)
    wanted = {(op, stage, i) for op in "FBW" for stage in range(schedule.stages) for i in range(schedule.microbatches)}
    seen = Counter((op, a.stage, a.microbatch) for a in count.elements() for op in a.op.value)
    if set(seen) != wanted or set(seen.values()) != {1}:
        return False
    graph = needs(schedule)
    for actions in schedule.ranks:
        for before, after in pairwise(actions):
            graph[after] = graph[after] | {before}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError:
        return False
    return True


def random_schedule(seed: int) -> Schedule:
    """Random ranks of stages, random fusing, and a random order in which everything could be run."""
    r = Random(seed)
    ranks, stages, microbatches = r.randint(1, 4), r.randint(1, 5), r.randint(1, 4)
    stage_ranks = tuple(r.randrange(ranks) for _ in range(stages))
    split = r.choice((0.0, 0.5, 1.0))
    actions: list[Action] = []
    for stage in range(stages):
        for i in range(microbatches):
            backward = (Op.B, Op.W) if r.random() < split else (Op.BW,)
            actions += [Action(op, stage, i) for op in (Op.F, *backward)]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    whole = Schedule(name="random", microbatches=microbatches, stage_ranks=stage_ranks, ranks=(tuple(actions),))
    sorter = TopologicalSorter(needs(whole))
    sorter.prepare()
    ready: list[Action] = []
    while sorter.is_active():
        ready += sorted(sorter.get_ready(), key=str)
        action = ready.pop(r.randrange(len(ready)) if r.random() < 0.7 else -1)
        lists[stage_ranks[action.stage]].append(action)
        sorter.done(action)
    return replace(whole, ranks=tuple(map(tuple, lists)))


def with_list(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = list(schedule.ranks)
    lists[rank] = tuple(actions)
    return replace(schedule, ranks=tuple(lists))
