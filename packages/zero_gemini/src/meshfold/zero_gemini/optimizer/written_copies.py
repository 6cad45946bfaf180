"""Shards in 16 bits that an optimizer's kernels write in the pass that steps their master weights, for no pass of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.optimizer.master_weights import Weights


class WrittenCopies:
    """Chunks whose shards an optimizer with ``copies`` has written, until they are published."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Args:
        optimizer: of the master weights' slices; one without ``copies`` writes none.
        """
        self._optimizer: Any = optimizer
        self._written: set[Chunk] = set()

    @contextmanager
    def writing(self, every: Collection[Weights]) -> Iterator[None]:
        """Context manager around a step: it may write the shards of weights on the device, and those written whole are noted."""
        self._written.clear()
        if not hasattr(self._optimizer, "copies"):
            yield
            return
        able = [weights for weights in every if weights.has_shard_beside]
        offered: dict[Tensor, Tensor] = {}
        for weights in able:
            weights.chunk.wait_for_gather()
            offered.update(weights.slices_of(weights.chunk.shard))
        self._optimizer.copies = offered
        try:
            yield
        finally:
            self._optimizer.copies = {}  # a chunk that moves must not be kept
        copied = self._optimizer.copied
        self._written.update(w.chunk for w in able if all(one in copied for one in w.parameters.values()))
        copied.clear()

    def take(self, chunk: Chunk) -> bool:
        """Return True if a chunk's shard has the values of its master weights already; the next time False."""
        written = chunk in self._written
        self._written.discard(chunk)
        return written
