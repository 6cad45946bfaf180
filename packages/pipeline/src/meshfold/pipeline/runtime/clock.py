"""Points in time between the actions of a device."""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceClock:
    """Events in the order of a GPU's stream, where nobody has to wait in between; the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """A point in time."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """From one point to a later one, once both have happened."""
        return float(begin.elapsed_time(end)) / 1e3 if self._device.type == "cuda" else float(end - begin)
