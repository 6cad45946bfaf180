"""Placement of chunks between their uses, simple rules that choose it, and the order of moves between two placements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.memory.arena import MemoryTier


@dataclass(frozen=True, kw_only=True)
class ChunkPlacement:
    """Placement of one chunk.

    Attributes:
        parameters: memory of the shard that the model computes with.
        state: memory of the master weights and optimizer state; the host steps chunks whose state is off the device.

    Raises:
        MemoryPlanError: for parameters on the host with their state on the device, or parameters on disk.
    """

    parameters: MemoryTier = "device"
    state: MemoryTier = "device"

    def __post_init__(self) -> None:
        if self.parameters == "disk":
            raise MemoryPlanError("parameters are on the device or on the host; only optimizer state can be on disk")
        if self.parameters == "host" and self.state == "device":
            raise MemoryPlanError(
                "parameters on the host have their optimizer state on the host or on disk, not on the device"
            )


PlacementRule = Callable[[Sequence[int]], Sequence[ChunkPlacement]]
"""Rule that maps the elements of all chunks' shards, in order of use, to the placement of each."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Rule that puts given shares of all elements on the host, starting with the ones used last.

    The gradients of the first ones arrive last, and their parameters are needed first.

    Attributes:
        host_parameters: share of the elements whose parameters are on the host.
        host_optimizer: share of the elements whose master weights and optimizer state are on the host; at least
            ``host_parameters``.
        disk_optimizer: share of the elements whose optimizer state is on disk; not more than ``host_optimizer``, in
            which it is counted.

    Raises:
        MemoryPlanError: for a number outside of 0 to 1, or shares in another order.
    """

    host_parameters: float = 0.0
    host_optimizer: float = 0.0
    disk_optimizer: float = 0.0

    def __post_init__(self) -> None:
        for name in ("host_parameters", "host_optimizer", "disk_optimizer"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise MemoryPlanError(f"{name}={getattr(self, name)!r}: give a fraction from 0 to 1")
        if self.host_parameters > self.host_optimizer:
            raise MemoryPlanError(
                f"host_parameters={self.host_parameters} is above host_optimizer={self.host_optimizer}: parameters on the "
                "host have their optimizer state there too; raise host_optimizer"
            )

        if self.disk_optimizer > self.host_optimizer:
            raise MemoryPlanError(
                f"disk_optimizer={self.disk_optimizer} is above host_optimizer={self.host_optimizer}: the host steps what is on "
                "disk; raise host_optimizer"
            )

    def __call__(self, sizes: Sequence[int]) -> list[ChunkPlacement]:
        elements, placements = max(sum(sizes), 1), []
        after = sum(sizes)
        for size in sizes:
            after -= size
            behind = after / elements  # fraction of elements in later chunks
            state: MemoryTier = (
                "disk" if behind < self.disk_optimizer else "host" if behind < self.host_optimizer else "device"
            )
            placements.append(
                ChunkPlacement(parameters="host" if behind < self.host_parameters else "device", state=state)
            )
        return placements


@dataclass(frozen=True, kw_only=True)
class ParameterBudget:
    """Rule that puts optimizer state on the host, and parameters on the device within a number of bytes.

    Attributes:
        most_bytes: limit of parameters on the device, including those that are gathered for use.
        element_bytes: of a parameter.
        state: placement of optimizer state.
    """

    most_bytes: int
    element_bytes: int
    state: MemoryTier = "host"

    def __call__(self, sizes: Sequence[int]) -> list[ChunkPlacement]:
        left = self.most_bytes - 2 * max(sizes, default=0) * self.element_bytes  # one chunk in use, one being loaded
        placements = []
        for size in sizes:
            left -= size * self.element_bytes
            placements.append(ChunkPlacement(parameters="device" if left >= 0 else "host", state=self.state))
        return placements


EVERYTHING_ON_THE_DEVICE = Shares()


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Move(Generic[T]):
    """Move of one object between memory tiers.

    Attributes:
        what: the object.
        device_bytes: change of the device's used memory; below 0 if the object leaves it.
        host_bytes: the same for the host's memory.
    """

    what: T
    device_bytes: int
    host_bytes: int


def in_turn(moves: Iterable[Move[T]]) -> list[Move[T]]:
    """Order moves so that device memory never exceeds the larger of its amounts before and after, and host memory by little.

    Moves that free host memory go first while they fit. If none fits, the smallest move off the device makes room. Host memory then
    exceeds its amount before and after by at most the largest move from it plus the largest to it.
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
        # If no remaining move frees device memory, all of them fit: the sums above include them.
        chosen = min(fitting or [move for move in left if move.device_bytes < 0], key=lambda move: move.host_bytes)
        left.remove(chosen)
        order.append(chosen)
        device, host = device + chosen.device_bytes, host + chosen.host_bytes
    return order
