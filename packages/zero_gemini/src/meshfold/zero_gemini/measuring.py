"""The rates of the machine at hand, measured in a second or two: what plans for this machine are made from."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from meshfold.kernels import AdamSettings, SplitState, adam_update_parameters
from meshfold.mesh import Group, all_gather
from meshfold.zero_gemini.disk import bench, free_bytes
from meshfold.zero_gemini.memory import Memory
from meshfold.zero_gemini.planner import H200, GiB, Machine, MiB
from meshfold.zero_gemini.transfer import stream_of, synchronize

_BYTES = 256 * MiB
_ELEMENTS = 2**25  # of the optimizer's step: 450 MB, more than caches hold
UNLIMITED = 2**60
"""Bytes of a memory that nobody limits."""


def measure(device: torch.device, *, everyone: Group, disk: str | os.PathLike[str] | None = None) -> Machine:
    """This rank's share of the machine. All ranks must call, so that those of one host are measured side by side.

    Args:
        device: where models compute.
        everyone: all ranks.
        disk: a folder for optimizer state; its disk is measured with 1 GiB.
    """
    found = _rates(device)
    if everyone.size > 1:
        found = replace(found, collective=_collective(device, everyone))
    if disk is not None:
        rates = bench(disk, GiB)
        found = replace(
            found, disk_read=rates.read_bytes_per_s, disk_write=rates.write_bytes_per_s,
            disk_bytes=free_bytes(Path(disk)) or 0,
        )  # fmt: skip
    return found


@functools.cache
def _rates(device: torch.device) -> Machine:
    host = _adam(device)
    machine = replace(
        H200, name=f"this machine ({_name(device)})", host_memory=host, cpu_optimizer={}, gpu_bytes=UNLIMITED,
        host_bytes=host_bytes(), disk_bytes=0,
    )  # fmt: skip
    if device.type != "cuda":
        # The compute device is a budget of the same memory: copies between the two are copies in it.
        copy = _seconds(lambda a, b: b.copy_(a), device, torch.empty(_BYTES, dtype=torch.uint8)) or 1e-9
        rate = _BYTES / copy
        return replace(machine, gpu_memory=host, h2d=rate, d2h=rate, pcie_both=rate, collective=rate)
    up, down, both = _copies(device)
    x = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    on_device = 2 * _BYTES / _seconds(lambda a, b: b.copy_(a), device, x)
    return replace(machine, gpu_memory=on_device, h2d=up, d2h=down, pcie_both=both)


def _adam(device: torch.device) -> float:
    """Bytes/s of host memory while the optimizer steps on the host and, with a GPU, parameters go to the device."""
    memory = Memory(device)
    blocks = {
        name: memory.allocate(_ELEMENTS, dtype, "host", "measuring")
        for name, dtype in (
            ("hi", torch.bfloat16), ("lo", torch.int16), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32),
            ("gradient", torch.bfloat16),
        )
    }  # fmt: skip
    planes = {name: block.tensor.zero_() for name, block in blocks.items()}
    gradient = planes.pop("gradient")
    state = SplitState(**planes)
    settings = AdamSettings(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, adamw_mode=True)
    there = torch.empty_like(gradient, device=device) if device.type == "cuda" else None
    best = 0.0
    for _ in range(4):
        copied = [] if there is None else _copying(there, gradient)
        begin = time.perf_counter()
        adam_update_parameters(state, gradient, settings, step=1, grad_scale=1.0, start=0, seed=0)
        took = time.perf_counter() - begin
        moved = 18 * _ELEMENTS + sum(event.query() for event in copied) * gradient.nbytes
        synchronize(device)
        best = max(best, moved / took)
    for block in blocks.values():
        block.free()
    return best


def _copying(there: Tensor, here: Tensor) -> list[torch.cuda.Event]:
    """Start more copies to the device than end while the optimizer steps once; what tells that each is done."""
    events = []
    with torch.cuda.stream(stream_of(there.device)):
        for _ in range(40):
            there.copy_(here, non_blocking=True)
            events.append(torch.cuda.current_stream(there.device).record_event())
    return events


def _copies(device: torch.device) -> tuple[float, float, float]:
    """Bytes/s to the device, from it, and both at once."""
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
    """Bytes/s that a rank receives in an all-gather."""
    mine = torch.zeros(64 * MiB // everyone.size, dtype=torch.uint8, device=device)
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


def device_bytes(device: torch.device) -> int:
    """What this process has of a GPU's memory, and what is free of it; of a CPU, which no one limits, :data:`UNLIMITED`."""
    if device.type != "cuda":
        return UNLIMITED
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def host_bytes() -> int:
    """What this process's control group may have of the host's memory, :data:`UNLIMITED` if it says nothing.

    The system's own count is not asked: on some virtual machines it grows only as memory is touched.
    """
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(place).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < UNLIMITED:
            return int(text)
    return UNLIMITED
