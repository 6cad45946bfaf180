"""Kernels of a step by their time, on a GPU, or operations of a CPU where there is none; functions of the host by theirs."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from pathlib import Path
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


def host_of(step: Callable[[], object]) -> list[str]:
    """Return lines on the host's part of a step: the seconds in which it queues one, and the functions that take most of them.

    Functions are profiled in another step, whose backward runs in the same thread.
    """
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    begun = time.perf_counter()
    step()
    queued = time.perf_counter() - begun
    wait()
    whole = time.perf_counter() - begun
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        step()
        wait()
        profiler.enable()
        step()
        profiler.disable()
        wait()
    rows: list[tuple[float, int, str]] = []
    for (file, line, name), (_, calls, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        rows.append((own, calls, f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})" if line else name))
    rows.sort(reverse=True)
    return [
        f"host: {queued * 1e3:.2f} ms until a step of {whole * 1e3:.2f} ms was queued; functions under a profiler, alone:",
        *(f"{own * 1e3:9.4f} ms {calls:8} x {name[:100]}" for own, calls, name in rows[:40]),
    ]


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
