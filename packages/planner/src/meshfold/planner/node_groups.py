"""Nodes of the groups along axes, by arithmetic: no list of all ranks is made, of which a large job has 100,000.

A rank's number is written in digits, one for each axis, or for each factor of an axis. Groups along some digits differ only in the
others: a group that begins ``devices`` ranks later lies on its nodes in the same way.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from meshfold.mesh import Mesh

Sizes = tuple[tuple[str, int], ...]
"""Axes of a mesh with their sizes, outermost first."""


@lru_cache(maxsize=4096)
def leaves_node(devices: int, sizes: Sizes, axes: tuple[str, ...]) -> bool:
    """Return True if ranks of some group along the axes are on several nodes.

    Args:
        devices: ranks of a node, which have consecutive numbers.
        sizes: of the mesh.
        axes: of the mesh, or factors of them.
    """
    span = sum((size - 1) * stride for size, stride in _digits(sizes, axes)[0])
    return max(_first_places(devices, sizes, axes)) + span >= devices


@lru_cache(maxsize=4096)
def ranks_of_a_node(devices: int, sizes: Sizes, axes: tuple[str, ...]) -> tuple[int, int]:
    """Return the fewest ranks of a group along the axes that share a node, and the ranks of a group.

    Args:
        devices: ranks of a node, which have consecutive numbers.
        sizes: of the mesh.
        axes: of the mesh, or factors of them.
    """
    own = _digits(sizes, axes)[0]
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in own:
        if stride % devices:  # else each of its ranks has nodes of its own
            offsets = (offsets + stride * np.arange(size)[:, None]).ravel()
    counts = (np.bincount((offsets + first) // devices) for first in _first_places(devices, sizes, axes))
    return min(int(count[count > 0].min()) for count in counts), math.prod(size for size, _ in own)


@lru_cache(maxsize=4096)
def some_neighbours_apart(devices: int, sizes: Sizes, axis: str, one: int, other: int) -> bool:
    """Return True if two coordinates along an axis are on different nodes in some group.

    Args:
        devices: ranks of a node, which have consecutive numbers.
        sizes: of the mesh.
        axis: of the mesh.
        one, other: coordinates.
    """
    stride = math.prod(size for _, size in sizes[[name for name, _ in sizes].index(axis) + 1 :])
    first_places = _first_places(devices, sizes, (axis,))
    return any((first + one * stride) // devices != (first + other * stride) // devices for first in first_places)


def _first_places(devices: int, sizes: Sizes, axes: tuple[str, ...]) -> set[int]:
    """Return the places on their node of the lowest ranks of all groups along the axes."""
    found = {0}
    for size, stride in _digits(sizes, axes)[1]:
        found = {(place + count * stride) % devices for place in found for count in range(min(size, devices))}
    return found


@lru_cache(maxsize=4096)
def _digits(sizes: Sizes, axes: tuple[str, ...]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the size and stride of a rank's digits along the axes, and of all others."""
    digits = Mesh(dict(sizes), rank=0).digits(*axes)
    own, others = (
        [(size, stride) for size, stride, varies in digits if varies is along and size > 1] for along in (True, False)
    )
    return own, others
