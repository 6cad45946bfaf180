"""Two host buffers for gradients on their way to the optimizer's step, where gradients are not held until the step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshfold.zero_gemini.memory.arena import Block, Memory

BUFFERS = 2
"""One is stepped from while another is filled; a plan counts as many (``planner.memory.gradient_ring``)."""


class GradientRing:
    """Buffers that are lent in turn, each until the step that reads it is complete."""

    def __init__(self, memory: Memory) -> None:
        """Args:
        memory: whose host arena they are in.
        """
        self._memory = memory
        self._blocks: list[Block] = []
        self._in_use: list[Callable[[], None] | None] = []
        self._turn = self.nbytes = 0

    def fit(self, nbytes: int) -> None:
        """Allocate buffers of ``nbytes`` bytes each, or none for 0. Waits for lent ones.

        Raises:
            OutOfBudget: if the host has less left; there are no buffers then.
        """
        if nbytes == self.nbytes:
            return
        with self._memory.waiting("the gradients' ring"):
            self._renew(nbytes)

    def _renew(self, nbytes: int) -> None:
        self.close()
        try:
            for _ in range(BUFFERS if nbytes else 0):
                self._blocks.append(
                    self._memory.allocate(nbytes, torch.uint8, "host", "gradients on their way to the step")
                )
        except BaseException:
            self.close()
            raise
        self._in_use = [None] * len(self._blocks)
        self.nbytes = nbytes

    def lend(self, elements: int, dtype: torch.dtype, until: Callable[[], None]) -> Tensor:
        """Return a flat buffer of ``elements`` elements with undefined contents; wait while all are in use.

        Args:
            elements: no more than ``nbytes`` has room for.
            dtype: of the elements.
            until: returns when the buffer's user is done with it.
        """
        with self._memory.waiting("the gradients' ring"):
            self._wait(self._turn)
        buffer = self._blocks[self._turn].tensor[: elements * dtype.itemsize].view(dtype)
        self._in_use[self._turn] = until
        self._turn = (self._turn + 1) % len(self._blocks)
        return buffer

    def close(self) -> None:
        """Wait for lent buffers, and release the memory."""
        for turn in range(len(self._in_use)):
            self._wait(turn)
        for block in self._blocks:
            block.free()
        self._blocks.clear()
        self._in_use.clear()
        self._turn = self.nbytes = 0

    def _wait(self, turn: int) -> None:
        until, self._in_use[turn] = self._in_use[turn], None
        if until is not None:
            until()
