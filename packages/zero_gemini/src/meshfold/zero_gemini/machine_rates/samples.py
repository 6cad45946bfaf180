"""Rates of this machine from samples, before there is a plan: a second or two each."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshfold.kernels import AdamSettings, AdamState, adam_step, adam_update_parameters
from meshfold.mesh import Group, all_gather
from meshfold.zero_gemini.errors import Faults
from meshfold.zero_gemini.machine_rates.available_memory import UNLIMITED_BYTES, available_host_bytes
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.memory.copies import stream_of, synchronize
from meshfold.zero_gemini.nvme import bench, free_bytes
from meshfold.zero_gemini.optimizer.cpu_executor import threads_for_steps
from meshfold.zero_gemini.optimizer.gpu_streaming import STREAMING_BYTES, GpuStreaming, HostState
from meshfold.zero_gemini.optimizer.master_weights import Plane, planes_of, state_of
from meshfold.zero_gemini.planner import H200, REGIMES, GiB, Machine, MiB, Regime

_BYTES, _BYTES_ON_HOST = 256 * MiB, 64 * MiB  # of copies with a GPU, and of copies between two places in host memory
# Of an optimizer step: 900 MB with a GPU, larger than caches. Without a GPU the rates only serve a rehearsal's plan,
# many ranks share the host, and 115 MB each is more than their share of a cache.
_ELEMENTS, _ELEMENTS_BESIDE_GPU = 2**23, 2**26
_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
ADAM = AdamSettings(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, adamw_mode=True)
_PERIOD_S, _BEGIN_S, _ROUNDS = 0.15, 0.03, 5
_STEADY_S, _MOST_S = 0.15, 1.5
WORTH_IT = 1.05
"""Smallest gain of cores with the device over cores alone for which state passes through the device."""


def measure_machine(
    device: torch.device,
    *,
    everyone: Group,
    disk: str | os.PathLike[str] | None = None,
    regime: str = "A",
    host: bool = True,
) -> Machine:
    """Measure this rank's share of the machine. All ranks must call, so that the ranks of one host are measured side by side.

    Args:
        device: where models compute.
        everyone: all ranks.
        disk: a folder for optimizer state; its disk is measured with 1 GiB.
        regime: of the optimizer's step, whose kernels measure the host; without such kernels, those of ``"A"``.
        host: also measure a GPU's host. It takes several GiB, and seconds, most of them to lock memory for the samples. Otherwise
            the rates of the host and of transfers to it are an H200's.

    Raises:
        DiskError: if one of the ranks cannot use it, on all of them.
    """
    found = _rates(device, _known(regime)) if host or device.type != "cuda" else _of_gpu_alone(device)
    if everyone.size > 1:
        found = replace(found, collective=_collective(device, everyone))
    if disk is not None:
        with Faults(everyone, device).raised_on_all():
            rates = bench(disk, GiB)
        found = replace(
            found,
            disk_read=rates.read_bytes_per_s,
            disk_write=rates.write_bytes_per_s,
            disk_bytes=free_bytes(Path(disk)) or 0,
        )
    return found


def measure_rank_rates(device: torch.device, regime: str = "A") -> None:
    """Measure and cache this rank's own rates before the model takes memory; :func:`measure_machine` reuses them."""
    _rates(device, _known(regime))


def _known(regime: str) -> str:
    return regime if regime in REGIMES else "A"


@functools.cache
def _rates(device: torch.device, regime: str) -> Machine:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_for_steps(threads))
    try:
        return _rates_of(device, REGIMES[regime])
    finally:
        torch.set_num_threads(threads)


@functools.cache
def _of_gpu_alone(device: torch.device) -> Machine:
    return replace(
        H200,
        name=f"this machine ({_name(device)}), its host not measured",
        gpu_memory=_gpu_memory(device),
        cpu_optimizer={},
        gpu_bytes=UNLIMITED_BYTES,
        host_bytes=available_host_bytes(),
        disk_bytes=0,
    )


def _gpu_memory(device: torch.device) -> float:
    """Measure a copy on the device: bytes/s, reads and writes together."""
    x = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    return 2 * _BYTES / _seconds(lambda a, b: b.copy_(a), device, x)


def _rates_of(device: torch.device, regime: Regime) -> Machine:
    if device.type != "cuda":
        host = _adam(device, regime)
        # The compute device is a part of host memory, so copies between the two are host copies.
        copy = _seconds(lambda a, b: b.copy_(a), device, torch.empty(_BYTES_ON_HOST, dtype=torch.uint8)) or 1e-9
        rate = _BYTES_ON_HOST / copy
        machine = replace(H200, gpu_memory=host, h2d=rate, d2h=rate, pcie_both=rate, collective=rate)
    else:
        alone, beside = _with_device(device, regime)
        up, down, both = _copies(device)
        # Stepped parameters are copied to the GPU meanwhile, which is no work of the cores.
        host = alone * (1.0 + regime.parameter / regime.first_pass)
        machine = replace(H200, gpu_memory=_gpu_memory(device), h2d=up, d2h=down, pcie_both=both)
        if beside.gain(alone, regime) >= WORTH_IT:
            machine = replace(
                machine,
                gpu_streaming=beside.device,
                host_memory_while_streaming=beside.cores,
                streaming_bytes=STREAMING_BYTES,
            )
    return replace(
        machine,
        name=f"this machine ({_name(device)})",
        host_memory=host,
        cpu_optimizer={},
        gpu_bytes=UNLIMITED_BYTES,
        host_bytes=available_host_bytes(),
        disk_bytes=0,
    )


class HostSample:
    """Optimizer state on the host, to measure steps by the cores or by the device."""

    def __init__(self, memory: Memory, regime: Regime) -> None:
        self.elements = _ELEMENTS if memory.device.type == "cpu" else _ELEMENTS_BESIDE_GPU
        self._regime = regime
        self.passed = 0  # elements that the device has stepped or queued
        dtype = _DTYPES.get(regime.name, torch.bfloat16)
        self._kept = planes_of(dtype, regime.name)
        planes = (Plane("weights", dtype), Plane("gradient", dtype), *self._kept)
        self._blocks = {
            plane.name: memory.allocate(plane.numel(self.elements), plane.dtype, "host", "measuring")
            for plane in planes
        }
        tensors = {name: block.tensor.zero_() for name, block in self._blocks.items()}
        self.gradient, self.weights = tensors.pop("gradient"), tensors.pop("weights")
        self.planes = tensors
        # Stepped parameters are copied here.
        self._there = torch.empty_like(self.weights, device=memory.device) if memory.device.type == "cuda" else None

    def half(self) -> int:
        """Run the first half of a step on the cores while as many parameters are copied to a GPU; return the cores' bytes."""
        self.show()
        state = state_of(self.weights, self.planes)
        adam_update_parameters(state, self.gradient, ADAM, step=1, grad_scale=1.0, start=0, seed=0)
        return round(self._regime.first_pass * self.elements)

    def through(self, streaming: GpuStreaming) -> Callable[[], None]:
        """Run a step on the device, followed by a copy of as many parameters; counts its elements in ``passed``."""

        def piece(_: int, state: AdamState, gradient: Tensor, begin: int) -> None:
            adam_step(state, gradient, ADAM, step=1, grad_scale=1.0, start=begin, seed=0)
            self.passed += gradient.numel()

        host = HostState(
            weights=self.weights,
            planes=self._kept,
            tensors=self.planes,
            gradient=self.gradient,
        )
        end = streaming.step(host, [(0, self.elements)], piece)
        self.show()
        return end

    def free(self) -> None:
        for block in self._blocks.values():
            block.free()

    def show(self) -> None:
        """Begin to copy the weights to a GPU, if there is one."""
        if self._there is not None:
            self._there.copy_(self.weights, non_blocking=True)


def _adam(device: torch.device, regime: Regime) -> float:
    """Measure host memory, bytes/s, while the optimizer steps on a host without a GPU."""
    sample = HostSample(Memory(device), regime)
    sample.half()  # compiles the kernel
    rate = _steady(sample.half)
    sample.free()
    return rate


def _steady(work: Callable[[], int]) -> float:
    """Return the sustained bytes/s of some work: the best period, once no faster one has come for a while.

    In a training step threads are awake and clocks are high; in a new process they are not. Other work on the machine only
    slows it down, so the best period counts.
    """
    best, begin = 0.0, time.perf_counter()
    better = now = begin
    while now - better < _STEADY_S and now - begin < _MOST_S:
        before = now
        moved = work()
        now = time.perf_counter()
        rate = moved / max(now - before, 1e-9)
        if rate > best:
            best, better = rate, now
    return best


class Beside(NamedTuple):
    """Rates while cores and device step together.

    Attributes:
        device: bytes/s of state that passes through the device.
        cores: bytes/s of host memory that the cores use.
    """

    device: float
    cores: float

    def gain(self, alone: float, regime: Regime) -> float:
        """Return how many times as many elements are stepped as by the cores ``alone``, bytes/s of host memory."""
        return (self.device / regime.step + self.cores / regime.first_pass) / (alone / regime.first_pass)


def _with_device(device: torch.device, regime: Regime) -> tuple[float, Beside]:
    """Measure cores alone, bytes/s of host memory, and together with the device, in periods by turns on the same memory.

    Both in one sample, since the same work is up to 1.4 times as fast in other pages of the host, or a second later beside other
    work on it. The round whose gain is the median counts. Stepped parameters are copied to the device all the time.
    """
    memory = Memory(device)
    mine, other = HostSample(memory, regime), HostSample(memory, regime)
    streaming = GpuStreaming(memory=memory)
    other.through(streaming)()  # compiles the kernels
    mine.half()

    def period(seconds: float) -> Beside:
        begin, passed, moved = time.perf_counter(), other.passed, 0
        while time.perf_counter() - begin < seconds:
            moved += mine.half()
        took = time.perf_counter() - begin
        return Beside((other.passed - passed) * regime.step / took, moved / took)

    def feed(stop: threading.Event) -> None:
        end: Callable[[], None] | None = None
        while not stop.is_set():
            end = other.through(streaming)
        if end is not None:
            end()

    def together(feeder: ThreadPoolExecutor) -> Beside:
        stop = threading.Event()
        fed = feeder.submit(feed, stop)
        try:
            period(_BEGIN_S)
            found = period(_PERIOD_S)
        finally:
            stop.set()
        fed.result()
        synchronize(device)
        return found

    with ThreadPoolExecutor(1, "meshfold-feed") as feeder:
        period(_PERIOD_S)  # threads are awake and clocks high from here on, as in a training step
        rounds = [(period(_PERIOD_S).cores, together(feeder)) for _ in range(_ROUNDS)]
    streaming.close()
    for sample in (mine, other):
        sample.free()
    return sorted(rounds, key=lambda each: each[1].gain(each[0], regime))[_ROUNDS // 2]


def _copies(device: torch.device) -> tuple[float, float, float]:
    """Measure copies to the device, from it, and both at once, bytes/s."""
    memory = Memory(device)
    blocks = [memory.allocate(_BYTES, torch.uint8, "host", "measuring") for _ in range(2)]
    a, b = (block.tensor for block in blocks)
    x, y = torch.empty_like(a, device=device), torch.empty_like(b, device=device)

    def both() -> None:
        with torch.cuda.stream(stream_of(device)):
            x.copy_(a, non_blocking=True)
        b.copy_(y, non_blocking=True)

    rates = [
        _BYTES / min(_took(lambda: x.copy_(a, non_blocking=True), device) for _ in range(3)),
        _BYTES / min(_took(lambda: b.copy_(y, non_blocking=True), device) for _ in range(3)),
        2 * _BYTES / min(_took(both, device) for _ in range(3)),
    ]
    for block in blocks:
        block.free()
    return rates[0], rates[1], rates[2]


def _collective(device: torch.device, everyone: Group) -> float:
    """Measure the bytes/s that a rank receives in an all-gather."""
    mine = torch.zeros((64 if device.type == "cuda" else 16) * MiB // everyone.size, dtype=torch.uint8, device=device)
    best = min(_took(lambda: all_gather(mine, everyone, 0), device) for _ in range(3))
    return mine.numel() * (everyone.size - 1) / best


def _seconds(copy: Callable[[Tensor, Tensor], object], device: torch.device, x: Tensor) -> float:
    y = torch.zeros_like(x)
    return min(_took(lambda: copy(x, y), device) for _ in range(3))


def _took(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return max(time.perf_counter() - begin, 1e-9)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
