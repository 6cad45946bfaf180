"""Memory of this process and its host."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from meshfold.engine.world.world import World

PROCESS_BYTES = 5 * 2**28
"""What a process has of the host's memory besides a model: Python, torch and CUDA (measured: 1.2 to 1.3 GiB)."""


def resident_bytes() -> int:
    """Return the host memory that this process uses; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def free_host_bytes() -> int:
    """Return the host memory that is available now; 0 where the system does not say.

    No more than that: the memory of some virtual machines grows as it is touched.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    entries = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(entries.get("MemAvailable", "0 kB").split()[0]) * 1024


def ranks_per_host(world: World) -> int:
    """Return how many ranks share this host's memory."""
    return min(world.mesh.world_size, torch.cuda.device_count() or world.mesh.world_size)
