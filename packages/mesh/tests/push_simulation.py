"""Ranks whose streams run in any order: a transport that queues, and a scheduler that picks what runs next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh.collectives.push import epochs
from meshfold.mesh.collectives.push.channel import Channel

Pick = Callable[[int], int]
"""Return which of so many runnable streams goes next."""


@dataclass
class Step:
    """Queued work: ``ready`` says whether it may run, ``run`` does it."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    done: bool = False


@dataclass
class Simulation:
    """The memory, flags and streams of all ranks. With ``serial`` all streams of a rank are one, in program order."""

    size: int
    slot_bytes: int
    serial: bool = False
    ranks: list[SimulatedRank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [SimulatedRank(self, index) for index in range(self.size)]

    def run(self, pick: Pick) -> None:
        """Run everything that is queued.

        Raises:
            AssertionError: if nothing can run though something is queued.
        """
        streams = [stream for rank in self.ranks for stream in rank.streams.values()]
        while waiting := [stream for stream in streams if stream]:
            runnable = [stream for stream in waiting if stream[0].ready()]
            assert runnable, "the ranks wait for each other"
            step = runnable[pick(len(runnable))].popleft()
            step.run()
            step.done = True


class SimulatedRank:
    """The transport of one rank."""

    def __init__(self, world: Simulation, index: int) -> None:
        self.world, self.index, self.size, self.slot_bytes = world, index, world.size, world.slot_bytes
        self.slots = torch.zeros(epochs.SLOTS, world.slot_bytes, dtype=torch.uint8)
        self.flags = [0] * (2 * world.size)
        names = ("compute",) if world.serial else ("compute", "send", "receive")
        self.streams: dict[str, deque[Step]] = {name: deque() for name in names}
        self._current = "compute"
        self.channel = Channel(self)

    def queue(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> Step:
        step = Step(run, ready)
        self.streams[self._current].append(step)
        return step

    def memory(self, rank: int, slot: int) -> Tensor:
        return self.world.ranks[rank].slots[slot]

    def write(self, rank: int, slot: int, start: int, block: Tensor, first: int, length: int) -> None:
        target, source = self.memory(rank, slot)[start : start + length], block[first : first + length]

        def move(start: int, stop: int) -> Callable[[], None]:
            def run() -> None:
                target[start:stop].copy_(source[start:stop])

            return run

        half = source.numel() // 2  # a copy takes time: others may see half of it
        self.queue(move(0, half))
        self.queue(move(half, source.numel()))

    def raise_flag(self, rank: int, place: int, number: int) -> None:
        def write() -> None:
            self.world.ranks[rank].flags[place] = epochs.word(number)

        self.queue(write)

    def await_flag(self, place: int, number: int) -> None:
        self.queue(lambda: None, lambda: epochs.is_reached(self.flags[place], number))

    def follow(self, *streams: str) -> None:
        point = self.mark()
        for stream in streams:
            with self.on(stream):
                self.after(point)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before = self._current
        if not self.world.serial:
            self._current = stream
        try:
            yield
        finally:
            self._current = before

    def handle(self) -> None:
        return None

    def mark(self) -> Any:
        return self.queue(lambda: None)

    def after(self, point: Any) -> None:
        if point is not None:
            self.queue(lambda: None, lambda: point.done or self.world.serial)

    def check(self, block: Tensor, wanted: int) -> None:
        """Read a block in two halves; all of it must be what its source has pushed in this call."""

        def look(part: Tensor) -> None:
            found = set(part.tolist())
            assert found == {wanted}, f"rank {self.index} read {found}, not {wanted}"

        half = block.numel() // 2
        self.queue(lambda: look(block[:half]))
        self.queue(lambda: look(block[half:]))
