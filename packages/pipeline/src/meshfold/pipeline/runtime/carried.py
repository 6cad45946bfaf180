"""Numbers sent along with the stream: each stage adds its blocks' numbers, the last reads all, and gradients go back."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from meshfold.pipeline.runtime.transfer_plan import Slot, Slots


class Carried(Protocol):
    """Numbers of blocks sent along with the stream, such as sums of routers, in one vector in the order of the blocks."""

    @property
    def dtype(self) -> torch.dtype:
        """Floating dtype of the vector."""

    def size(self, block: int) -> int:
        """Return the elements that blocks before this one make."""

    def arrive(self, numbers: Tensor | None, first: int) -> None:
        """Take the numbers of blocks before ``first``, None if there are none, before blocks from there on run."""

    def leave(self, first: int, stop: int) -> Tensor:
        """Return the numbers of blocks ``first`` to ``stop`` (excluded), which have just run: differentiable."""


def carried_slots(carried: Carried | None, block: int) -> Slots:
    """Return the slot of the numbers that travel to a stage that begins with a block; none if there are none."""
    size = 0 if carried is None else carried.size(block)
    return () if carried is None or not size else (Slot(place=-1, shape=(size,), dtype=carried.dtype),)
