"""When copies from the host begin: a unit ahead, or by time where units are shorter than their chunk's copy.

A plan's seconds count copies one by one: compute waits for what is longer than the timesteps from a gather's beginning to the use.
But one link carries all of them in turn. In the middle of a U-Net units are short and each has a chunk of its own: there compute
waits unless the copies of several units are on their way before the first of them begins. So once there is a plan, its copies are
played through. If compute waits for them, the plan is made again with gathers that begin by time, in whose windows chunks take
memory. It is taken if compute or the whole step takes less time all the same, and the step no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshfold.zero_gemini.planner.memory import gather_windows, has_shadow_copy
from meshfold.zero_gemini.planner.rates import Machine
from meshfold.zero_gemini.planner.result import Plan, options_of
from meshfold.zero_gemini.planner.workload import Limits, Workload
from meshfold.zero_gemini.prefetch import ready_in_time

LEADS = (1, 2, 4)
"""Times that are tried between a gather's beginning and the use, in copies of the largest chunk that comes from the host."""
WORTH = 0.005
"""Fraction of a step that copies which begin earlier must save, of compute and the step, for another plan to be made and taken."""
_ALIKE = 0.001
"""Fraction of a step that is no difference: a shorter lead, which takes less memory, may be slower by as much."""

Planner = Callable[[Workload, Machine, Limits], Plan | None]
"""Returns the fastest plan of a workload within limits; None if nothing fits."""


def with_copies_ahead(made: Plan, planned: Planner) -> Plan:
    """Return a plan whose copies begin by time, if that takes less time within the same limits; else the plan itself.

    Args:
        made: gathers by count.
        planned: makes another plan.
    """
    workload = made.workload
    if workload.timestep_seconds is None or workload.stage < 3 or not workload.in_order:
        return made
    most, spent = made.seconds * (1 + _ALIKE), made.seconds * (1 - WORTH) + _compute(made)
    for ready in dict.fromkeys(_tables(made)):
        other = planned(replace(workload, ready=ready), made.machine, made.limits)
        if other is not None and other.seconds <= most and other.seconds + _compute(other) < spent:
            return other
    return made


def seconds_waited(made: Plan, ready: tuple[int, ...] | None) -> float:
    """Return how long compute waits in a step for copies of parameters from the host, which one link carries in turn.

    A chunk that the host steps is copied in the forward once it is stepped: these copies count only where the step is over
    long before, as it is for a speculative step of one rank.

    Args:
        made: the plan.
        ready: the workload's, in place of its own.
    """
    return sum(seconds for seconds, _ in _waits(made, ready))


def _compute(made: Plan) -> float:
    """Return the seconds of a step's compute, with its waits for copies."""
    weights = {name: weight for name, weight, _ in made.phases}
    return _in_turn(made) + sum(weights[term.phase] * term.seconds for term in made.terms if term.name == "compute")


def _in_turn(made: Plan) -> float:
    """Return the seconds that compute waits because copies wait for one another, which the plan's own seconds leave out."""
    waits = _waits(made, made.workload.ready)
    return max(0.0, sum(seconds for seconds, _ in waits) - sum(alone for _, alone in waits))


def _waits(made: Plan, ready: tuple[int, ...] | None) -> list[tuple[float, float]]:
    """Return the seconds that compute waits for each copy: in turn with the others, and as the plan's seconds count it, alone."""
    workload, machine = replace(made.workload, ready=ready), made.machine
    half, width = workload.forward_timesteps, workload.regime.parameter
    assert workload.timestep_seconds is not None  # asked by the callers
    lasts = _seconds(made)
    options = options_of(made).chunks
    ahead = has_shadow_copy(workload, made.strategy)[np.arange(len(options)), options] & (workload.data_ranks == 1)
    copies: list[tuple[int, int, float]] = []  # begin, use, seconds
    for chunk, placed, early in zip(workload.chunks, made.chunks, ahead.tolist(), strict=True):
        copy = width * chunk.elems / machine.h2d
        if placed.parameters != "host":
            if early and placed.state == "host":  # what the host has stepped
                copies.append((workload.ready_from(chunk.forward[0]), chunk.forward[0], copy))
            continue
        for begin, _ in gather_windows(chunk, workload):
            use = min(first for first, _ in chunk.uses if first >= begin)
            if use >= half or early or not chunk.trainable:
                copies.append((begin, use, copy))
    compute, link, at, waits = 0.0, 0.0, 0, []
    arrivals: dict[int, list[tuple[float, float]]] = {}  # of a use: when each copy is there, in turn and alone
    copies.sort()
    for timestep, seconds in enumerate(lasts):
        while at < len(copies) and copies[at][0] == timestep:
            _, use, spent = copies[at]
            link, at = max(link, compute) + spent, at + 1
            arrivals.setdefault(use, []).append((link, spent - sum(workload.timestep_seconds[timestep:use])))
        for there, alone in arrivals.pop(timestep, []):
            waits.append((max(0.0, there - compute), max(0.0, alone)))
            compute = max(compute, there)
        compute += seconds
    return waits


def _seconds(made: Plan) -> list[float]:
    """Return the seconds of compute in each timestep under a plan."""
    workload = made.workload
    assert workload.timestep_seconds is not None  # asked by the callers
    lasts = [*workload.timestep_seconds]
    for layer, placed in zip(workload.layers, made.layers, strict=True):
        if not placed.kept:
            lasts[min(layer.last + 1, workload.timesteps - 1)] += layer.recompute_seconds
    return lasts


def _tables(made: Plan) -> Sequence[tuple[int, ...]]:
    """Return the workload's ``ready`` for each lead that is worth a plan: the best, then shorter ones, which take less memory."""
    workload = made.workload
    assert workload.timestep_seconds is not None  # asked by the callers
    away = [
        c.elems
        for c, placed in zip(workload.chunks, made.chunks, strict=True)
        if "host" in (placed.parameters, placed.state)
    ]
    copy = workload.regime.parameter * max(away, default=0) / made.machine.h2d
    tables = [
        ready_in_time(
            workload.timestep_seconds,
            lead * copy,
            light=workload.light_timesteps,
            prefetch=workload.prefetch_timesteps,
        )
        for lead in LEADS
    ]
    waits = [seconds_waited(made, ready) for ready in tables]
    least, now = min(waits), seconds_waited(made, None)
    if now - least < WORTH * made.seconds:
        return []
    best = next(i for i, spent in enumerate(waits) if spent <= least + _ALIKE * made.seconds)
    return tables[best::-1]
