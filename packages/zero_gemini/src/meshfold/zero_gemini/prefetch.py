"""Rule for how early a unit is gathered: while a unit runs that computes long enough to hide it.

A final norm is too short to hide a gather. So only units with enough compute count; *light* ones are skipped, and gathered with
the next one that is not light.

A plan knows the seconds of units, and how long a copy from the host takes. Where units are shorter than that, it may let gathers
begin by time: several units ahead there, one where units are long (:func:`ready_in_time`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

_LIGHT = 64
"""A light unit has less than 1/64 of the elements of the largest one: norms, small embeddings."""


def light_ones(elems: Mapping[Name, int]) -> frozenset[Name]:
    """Return the names of the light units.

    Args:
        elems: of the parameters of each.
    """
    largest = max(elems.values(), default=0)
    return frozenset(name for name, own in elems.items() if own * _LIGHT < largest)


def reach(coming: Iterable[bool], prefetch: int) -> int:
    """Return how many of the coming units are gathered now.

    Args:
        coming: of each, in order, whether it is light.
        prefetch: number of units that are not light; light ones before them are included.
    """
    left, found = prefetch, 0
    for is_light in coming:
        if left < 1:
            break
        found += 1
        left -= not is_light
    return found


def ready_from(timestep: int, light: frozenset[int], prefetch: int) -> int:
    """Return the timestep from which the unit that is entered at ``timestep`` is gathered; the inverse of :func:`reach`.

    Args:
        timestep: one unit is entered at each.
        light: timesteps of light units.
        prefetch: as in :func:`reach`.
    """
    left = prefetch
    while timestep > 0 and left > 0:
        timestep -= 1
        left -= timestep not in light
    return timestep


def ready_in_time(seconds: Sequence[float], lead: float, *, light: frozenset[int], prefetch: int) -> tuple[int, ...]:
    """Return for each timestep the one from which its unit is gathered: none later than by :func:`ready_from`.

    Args:
        seconds: of compute in each timestep.
        lead: seconds of compute between the beginning of a gather and the unit's, where the step is that old.
        light: as in :func:`ready_from`.
        prefetch: as in :func:`reach`.
    """
    found = []
    for timestep in range(len(seconds)):
        begin, before = timestep, 0.0
        while begin > 0 and before < lead:
            begin -= 1
            before += seconds[begin]
        found.append(min(begin, ready_from(timestep, light, prefetch)))
    return tuple(found)


def reaches(ready: Sequence[int], timesteps: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the coming units are gathered with each unit of a step, if each is ready from the given timestep.

    Args:
        ready: for each timestep the one from which its unit is gathered, none before that of an earlier timestep.
        timesteps: of the step's units, in order.
    """
    begins = [ready[timestep] for timestep in timesteps]
    return tuple(bisect_right(begins, timestep) - 1 - place for place, timestep in enumerate(timesteps))


def timesteps_of(order: Iterable[Name], units: Sequence[Name]) -> list[int] | None:
    """Return the timesteps of a step's units; None if they run in another order than the timesteps.

    Args:
        order: of the step.
        units: of each timestep. Those that a traced block repeats in its recomputation are missing in a step that keeps the block.
    """
    found, last = [], -1
    for unit in order:
        last = next((t for t in range(last + 1, len(units)) if units[t] == unit), len(units))
        found.append(last)
    return found if last < len(units) else None
