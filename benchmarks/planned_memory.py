"""Compare what a generator says that it takes of a GPU with what torch's allocator has given it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class PlannedMemory:
    """Measures what is allocated from now on. Made before the generator; its model may be there already."""

    def __init__(self) -> None:
        self._before = (0, 0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def of(self, generator: Any, text: Callable[[], object]) -> dict[str, Any]:
        """Return bytes: ``planned`` before any text, in ``parts``; ``allocated`` at most and ``reserved`` with texts; no GPU: None.

        Weights count as they are planned, in all three. Two texts are made: a graph is captured at the second use. All ranks call.
        """
        told = generator.memory()
        found: dict[str, Any] = dict(planned=told.total, parts=str(told), allocated=None, reserved=None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what the plan's own forward has left
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            text()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            now = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
            for name, after, before in zip(("allocated", "reserved"), now, self._before, strict=True):
                found[name] = told.weights + after - before
        return found
