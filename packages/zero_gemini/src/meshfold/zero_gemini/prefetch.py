"""Rule for how far ahead of its use a unit is gathered: behind units that compute long enough to hide it.

A final norm is over before anything could be gathered beside it. So what counts as a unit to gather behind is one that has
something to compute; *light* ones are passed over, and gathered with the next one that is not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

_LIGHT = 64
"""A light unit has less than this part of the largest one's elements: norms, small embeddings."""


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
        prefetch: so many that are not, and the light ones before them.
    """
    left, found = prefetch, 0
    for is_light in coming:
        if left < 1:
            break
        found += 1
        left -= not is_light
    return found


def ready_from(moment: int, light: frozenset[int], prefetch: int) -> int:
    """From which moment on the unit that is entered at ``moment`` is gathered; the other side of :func:`reach`.

    Args:
        moment: at each of which one unit is entered.
        light: moments of light units.
        prefetch: as there.
    """
    left = prefetch
    while moment > 0 and left > 0:
        moment -= 1
        left -= moment not in light
    return moment
