"""Memory pressure: ranks tell each other that a device is about to run out of memory, before one does.

A rank that runs out in a forward leaves the others waiting in a collective, which cannot be undone. So after every step
each says how it stands. The answer is looked at a step later, when it has long been there: nobody waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.engine.world.world import World
from meshfold.mesh import all_reduce


class Pressure:
    """Asks all ranks of a world, or of a stage of a pipeline, after each of their steps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._retries = retries(world.device)
        self._said: Tensor | None = None
        self._there: torch.cuda.Event | None = None

    def found(self, *, peak_bytes: int, most_bytes: int) -> bool:
        """Return whether some rank was short of memory in the step before the last. All ranks must call.

        Args:
            peak_bytes: the most that tensors took of this rank's device in the last step.
            most_bytes: that they should have taken.
        """
        said, there = self._said, self._there
        now = retries(self._world.device)
        short = now > self._retries or peak_bytes > most_bytes
        self._retries = now
        mine = torch.full((1,), int(short), device=self._world.device)
        told = all_reduce(mine, self._world.stage_group, "max")
        if told.is_cuda:
            self._said = torch.empty(1, dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)
            self._there = torch.cuda.current_stream(self._world.device).record_event()
        else:
            self._said = told
        if there is not None:
            there.synchronize()
        return said is not None and bool(int(said))

    def forget(self) -> None:
        """Forget what was said so far: it is of another plan."""
        self._said = self._there = None
        self._retries = retries(self._world.device)


def retries(device: torch.device) -> int:
    """Return how often the allocator had to give back what it held before it found memory; each is a near end."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
