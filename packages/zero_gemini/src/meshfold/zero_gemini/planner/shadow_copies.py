"""Shadow copies of the state of some chunks, where the host has no memory for those of all, or where that is faster.

With a shadow copy a chunk is stepped during the backward, before the norm is known. Without one it waits for the norm, and the
forward may wait for it. The first chunks of the forward have them: their gradients come last and they are needed first. The others
are stepped while the forward computes with these, and their moments are written while gradients of the first are still to come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from math import ceil

from meshfold.zero_gemini.planner.options import NONE, SPECULATIVE_STEP, SPLIT_STEP
from meshfold.zero_gemini.planner.rates import Machine
from meshfold.zero_gemini.planner.result import Plan, recost
from meshfold.zero_gemini.planner.workload import Limits, Workload

PARTS = 16
"""Numbers of chunks that are tried: so many parts of all, as far as the host has memory."""

Planner = Callable[[Workload, Machine, Limits], Plan | None]
"""Returns the fastest plan of a workload within limits; None if nothing fits."""


def with_shadow_copies(made: Plan, planned: Planner) -> Plan:
    """Return a plan in which only the first chunks have shadow copies, if that is faster within the limits; else the plan itself.

    Args:
        made: of steps that clip.
        planned: makes another plan.
    """
    workload = made.workload
    allowed = workload.strategies is None or {SPLIT_STEP, SPECULATIVE_STEP} <= {*workload.strategies}
    one_by_one = made.strategy != NONE and not workload.steps_at_once
    if not (allowed and one_by_one and made.host_elems) or workload.clip_probability:
        return made
    most = made.limits.as_tuple()[1]
    tried = (_with(made, count) for count in _counts(made))
    fitting = takewhile(lambda one: one.peak_host_bytes <= most, tried)
    best = min(fitting, key=lambda one: one.seconds, default=made)
    if best.seconds >= made.seconds:
        return made
    other = planned(best.workload, made.machine, made.limits)  # chunks may have other places then
    return best if other is None or other.seconds >= best.seconds else other


def _with(made: Plan, count: int) -> Plan:
    """Return the same placement with shadow copies of the first ``count`` chunks."""
    return recost(replace(made, strategy=SPECULATIVE_STEP), replace(made.workload, shadow_copies=count), made.machine)


def _counts(made: Plan) -> list[int]:
    """Return the numbers of chunks that are tried, in rising order: among each there are some of the host's."""
    chunks = len(made.chunks)
    counts = dict.fromkeys(ceil(part / PARTS * chunks) for part in range(1, PARTS))
    return [count for count in counts if any(one.state == "host" for one in made.chunks[:count])]
