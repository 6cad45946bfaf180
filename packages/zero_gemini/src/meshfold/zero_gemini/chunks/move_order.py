"""In which order chunks change homes, so that neither side needs more on the way than at both ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Move(Generic[T]):
    """Something that moves.

    Attributes:
        what: it.
        device_bytes: by how much more of the device is in use afterwards; below 0 where it leaves.
        host_bytes: the same of the host's memory.
    """

    what: T
    device_bytes: int
    host_bytes: int


def in_turn(moves: Iterable[Move[T]]) -> list[Move[T]]:
    """An order in which the device never has more than at the start or the end, and the host hardly.

    What relieves the host goes first wherever it fits. Where nothing fits, the least of what leaves the device makes
    room: the host then has at most as much more as the largest that comes from it and the largest that leaves.
    """
    left = list(moves)
    most_device = max(0, sum(move.device_bytes for move in left))
    most_host = max(0, sum(move.host_bytes for move in left))
    order: list[Move[T]] = []
    device = host = 0
    while left:
        fitting = [
            move
            for move in left
            if device + move.device_bytes <= most_device
            and (move.host_bytes <= 0 or host + move.host_bytes <= most_host)
        ]
        # With nothing that leaves the device, all that is left fits: the sums above are over it too.
        chosen = min(
            fitting or [move for move in left if move.device_bytes < 0], key=lambda move: move.host_bytes
        )
        left.remove(chosen)
        order.append(chosen)
        device, host = device + chosen.device_bytes, host + chosen.host_bytes
    return order
