"""Memory that this process uses, and memory that it may use."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

UNLIMITED_BYTES = 2**60
"""Size of a memory without a limit, in bytes."""


def available_device_bytes(device: torch.device) -> int:
    """Return the GPU memory that this process has reserved or can still get; :data:`UNLIMITED_BYTES` on a CPU."""
    if device.type != "cuda":
        return UNLIMITED_BYTES
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def available_host_bytes() -> int:
    """Return the host memory that this process's control group may use; :data:`UNLIMITED_BYTES` without a limit.

    The system's own count is not used: on some virtual machines it grows only as memory is touched.
    """
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(place).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < UNLIMITED_BYTES:
            return int(text)
    return UNLIMITED_BYTES


def present_host_bytes() -> int:
    """Return the memory that the system counts now; 0 where it does not say. Some virtual machines get more as it is touched."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not Linux
        return 0


def resident_bytes() -> int:
    """Return the host memory that this process uses; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
