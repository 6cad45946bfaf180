"""Probes of live bytes other than model data: read from a GPU's allocator, or counted by ``LiveBytes``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from meshfold.zero_gemini.memory.arena import Arena


class MemoryProbe(Protocol):
    """Probe of bytes that are not model data: a context manager that counts while it is entered."""

    @property
    def round_bytes(self) -> int:
        """Each storage counts in multiples of this."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any, /) -> Any: ...

    def take(self) -> tuple[int, int]:
        """Return (peak since the last call, current), in bytes; the next peak starts now."""


class CudaBytes:
    """Bytes that the caching allocator has allocated, without model data.

    It resets the allocator's peak at every timestep, so ``torch.cuda.max_memory_allocated`` is meaningless to others during the
    trace.
    """

    round_bytes = 512
    """of the caching allocator"""

    def __init__(self, device: torch.device, *, model_bytes: Callable[[], int]) -> None:
        """Args:
        device: a GPU.
        model_bytes: returns the peak of model data on it since the last call, see :func:`peak_of`.
        """
        self._device, self._model_bytes = device, model_bytes

    def __enter__(self) -> CudaBytes:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._model_bytes()
        return self

    def __exit__(self, *error: object) -> None: ...

    def take(self) -> tuple[int, int]:
        # The two peaks may be at different times, but their difference makes plans of this placement exact.
        peak = torch.cuda.max_memory_allocated(self._device) - self._model_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        now = torch.cuda.memory_allocated(self._device) - self._model_bytes()
        return max(peak, now, 0), max(now, 0)


def peak_of(arena: Arena) -> Callable[[], int]:
    """Return a function that returns an arena's peak since its last call."""

    def most() -> int:
        peak = arena.peak_bytes
        arena.reset_peak()
        return peak

    return most
