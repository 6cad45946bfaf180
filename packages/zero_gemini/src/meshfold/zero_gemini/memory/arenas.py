"""The memory that chunks live in: one arena where the model computes, and one at home, each with a budget."""

from __future__ import annotations

from typing import Literal

import torch

from meshfold.zero_gemini.memory.arena import Arena, Block
from meshfold.zero_gemini.memory.host_waits import Waiting

MemoryTier = Literal["device", "host", "disk"]
"""Memory that holds something between its uses; data on disk visits the host."""


class Memory:
    """Two arenas. Without a GPU both are the CPU's memory, and budgets alone tell them apart.

    Attributes:
        compute: the arena where the model computes.
        home: the arena of the host; page-locked if the model computes on a GPU.
        device: of ``compute``.
        host: of ``home``.
        waiting: goes round what the host waits for before memory can be used again.
    """

    def __init__(
        self, device: torch.device, *, device_bytes: int | None = None, host_bytes: int | None = None
    ) -> None:
        """Args:
        device: where the model computes.
        device_bytes: budget of chunks there; None for what it has.
        host_bytes: budget at home.
        """
        self.device, self.host = device, torch.device("cpu")
        self.compute = Arena(f"compute device {device}", device, device_bytes)
        self.home = Arena("host", self.host, host_bytes, pinned=device.type == "cuda")
        self.waiting = Waiting()

    def arena(self, place: MemoryTier) -> Arena:
        """Return the arena of a memory tier."""
        return self.compute if place == "device" else self.home

    def allocate(self, elements: int, dtype: torch.dtype, place: MemoryTier, purpose: str) -> Block:
        """A flat block of undefined contents; the caller frees it.

        Raises:
            OutOfBudget: if there is not as much left.
        """
        return self.arena(place).allocate(elements, dtype, purpose)

    def count(self, tensor: torch.Tensor, purpose: str) -> Block:
        """Account for a tensor of the compute device that somebody else made, until the block is freed."""
        return self.compute.count(tensor, purpose)
