"""Kernels of a step by their time, by torch's profiler: on a GPU, or operations of a CPU where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Kernel = tuple[str, float, float]
"""name, calls, and milliseconds in all of them"""


def kernels_of(step: Callable[[], object]) -> list[Kernel]:
    """Return the kernels of a step, those that take longest first."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    with profile(activities=kinds, acc_events=True) as profiled:
        step()
        wait()
    events: Any = profiled.key_averages()
    if on_gpu:
        found = [
            (e.key, e.count, e.self_device_time_total / 1e3) for e in events if str(e.device_type).endswith("CUDA")
        ]
    else:
        found = [(e.key, e.count, e.self_cpu_time_total / 1e3) for e in events]
    return sorted((each for each in found if each[2] > 0), key=lambda each: -each[2])


def kernels_after(whole: Sequence[Kernel], first: Sequence[Kernel], times: int) -> list[Kernel]:
    """Return a step's kernels less those of its first part, divided by ``times``: of each of the equal parts that follow."""
    before = {name: (calls, ms) for name, calls, ms in first}
    found = []
    for name, calls, ms in whole:
        less, spent = before.get(name, (0, 0.0))
        found.append((name, (calls - less) / times, (ms - spent) / times))
    return sorted((each for each in found if each[1] > 0 and each[2] > 0), key=lambda each: -each[2])


def lines_of(kernels: Sequence[Kernel], most: int = 60) -> list[str]:
    """Return a line for each kernel."""
    return [f"{ms:9.4f} ms {calls:8.2f} x {name[:100]}" for name, calls, ms in kernels[:most]]
