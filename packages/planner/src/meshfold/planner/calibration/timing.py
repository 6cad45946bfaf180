"""Timings of work on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import torch

MiB = 2**20
_MOST_CALLS = 1000  # in a timing
_MOST_QUEUED = 300  # calls of up to three launches: a device queues about a thousand, then the host waits
_CLOCK_HZ = 2e9  # at least as fast as a GPU counts the cycles that it waits
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes of samples.

    Attributes:
        sides: of square matmuls, rising.
        longest_s: seconds of a matmul above which no larger ones are measured.
        window_s: least seconds of one timing.
        repeats: timings of each sample. On a GPU the fastest counts, since other work only slows it down; on a CPU the median, as
            in training.
        steady_s: seconds of matmuls in sequence.
        narrow: the smallest and the largest of ``sides`` for which narrow products are measured.
        rows: of these products.
        tokens: of attention's longer sequences; shorter ones have a quarter of them, on a CPU a sixteenth.
        attention_s: least seconds of one attention and its backward.
        memory_bytes: of a copy.
        message_bytes: of collectives' blocks, rising.
        beside_s: least seconds of collectives beside matmuls.
        layers: of the model that measures launches.
        steps: of it, each of two micro-steps.
        warm_up: steps that are not timed, before those that are.
        disk_bytes: of the file that measures a disk.
        host: measure copies to a GPU and the host's memory.
    """

    sides: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    longest_s: float = 0.25
    window_s: float = 0.02
    repeats: int = 5
    steady_s: float = 2.0
    narrow: tuple[int, int] = (256, 4096)
    square: tuple[int, ...] = (256, 512, 768, 1024, 1280, 1536, 2048)
    rows: int = 16384
    tokens: int = 2048
    attention_s: float = 0.004
    memory_bytes: int = 256 * MiB
    message_bytes: tuple[int, ...] = (*(1024 * 4**n for n in range(5)), *(MiB * 2**n for n in range(9)))
    beside_s: float = 0.4
    layers: int = 24
    steps: int = 20
    warm_up: int = 4
    disk_bytes: int = 1024 * MiB
    host: bool = True


TINY = Effort(
    sides=(16, 32, 64),
    window_s=0.0,
    repeats=1,
    steady_s=0.0,
    narrow=(16, 32),
    square=(16, 24),
    rows=64,
    tokens=32,
    attention_s=0.0,
    memory_bytes=MiB,
    message_bytes=(256, 1024, 4096, 16384),
    beside_s=0.0,
    layers=1,
    steps=1,
    warm_up=0,
    disk_bytes=MiB,
    host=False,
)
"""Sizes to try the command with; too small for meaningful rates."""


def call_seconds(work: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Return the seconds of one call, after a warm-up: of several timings a GPU's fastest, or the median of a CPU's."""
    calls = _calls_in_a_window(work, device, effort)
    usual = median if device.type == "cpu" else min
    return usual([mean_seconds(work, device, calls) for _ in range(effort.repeats)])


def _calls_in_a_window(work: Callable[[], object], device: torch.device, effort: Effort) -> int:
    """Run the work, and return how many calls fill the window of a timing."""
    work()
    return max(1, min(_MOST_CALLS, math.ceil(effort.window_s / mean_seconds(work, device, 1))))


def mean_seconds(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the seconds of a call, the mean of several in a row, from an idle device to an idle device."""
    wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    wait(device)
    return max(time.perf_counter() - begin, 1e-9) / calls


def device_seconds(work: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Return the device's seconds for one call when the host is ahead of it: the fastest of several timings."""
    if device.type != "cuda":
        return call_seconds(work, device, effort)
    work()
    once = mean_seconds(work, device, 1)
    calls = max(1, min(_MOST_QUEUED, math.ceil(effort.window_s / once)))
    return min(_queued(work, device, calls, calls * once) for _ in range(effort.repeats))


def _queued(work: Callable[[], object], device: torch.device, calls: int, ahead_s: float) -> float:
    """Return the device's seconds of a call, the mean of several that start once the host has launched them all."""
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(math.ceil(ahead_s * _CLOCK_HZ))
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return max(float(begin.elapsed_time(end)) / 1e3, 1e-9) / calls


def wait(device: torch.device) -> None:
    """Wait until the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Pace:
    """The speed of a CPU while it is measured, which other work on the host changes within seconds.

    A reference is timed beside every sample. What a sample takes by what the reference beside it takes does not depend on the
    moment, so samples of fast and slow seconds can be compared.

    Args:
        reference: what is timed beside the samples; it should be slowed down as they are.
        effort: sizes of samples.
    """

    def __init__(self, reference: Callable[[], object], effort: Effort) -> None:
        self._reference, self._effort = reference, effort
        self._marks: list[float] = []

    def mark(self) -> float:
        """Return the seconds of the reference now."""
        self._reference()  # into the cache
        self._marks.append(mean_seconds(self._reference, _CPU, 1))
        return self._marks[-1]

    def ratio(self, work: Callable[[], object], least_s: float = 0.0) -> float:
        """Return the seconds of a call by those of the reference: the median of several timings between two of the reference.

        Args:
            work: to time.
            least_s: seconds of all timings.
        """
        calls = _calls_in_a_window(work, _CPU, self._effort)
        begin, before = time.perf_counter(), self.mark()
        found: list[float] = []
        while len(found) < self._effort.repeats or time.perf_counter() - begin < least_s:
            took, after = mean_seconds(work, _CPU, calls), self.mark()
            found.append(2 * took / (before + after))
            before = after
        return median(found)

    @cached_property
    def usual(self) -> float:
        """The median of the reference's seconds until this is asked for first. A call usually takes ``ratio`` times as long."""
        return median(self._marks or [self.mark()])
