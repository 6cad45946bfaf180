"""Limit of a device's memory: the part that a plan may fill, and what the rest is for."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from meshfold.mesh.collectives.push import channel_bytes
from meshfold.mesh.spec import format_bytes
from meshfold.zero_gemini.machine_rates import ALLOCATOR_MARGIN
from meshfold.zero_gemini.planner import DoesNotFit

CONTEXT_BYTES, USUAL_CONTEXT_BYTES, MOST_CONTEXT_BYTES = 600 * 2**20, 2**30, 1280 * 2**20
"""Bytes that CUDA and its libraries take of a GPU besides what the allocator counts: at least, usually, and at most.

They are measured when a plan is made: 0.75 to 1.12 GiB on H200s. Memory of other processes cannot be told from them, hence the
most. What is planned without a GPU counts the usual ones.
"""


@dataclass(frozen=True, kw_only=True)
class DeviceLimit:
    """Limit of a rank's device.

    Attributes:
        bytes: that the process may take of the device.
        outside: of these, what is not the allocator's: CUDA's part and push channels.
        shrunk: share of the rest that is left free in addition to the margin for gaps between tensors.
    """

    bytes: int
    outside: int = 0
    shrunk: float = 0.0

    @property
    def allocator_bytes(self) -> int:
        """Bytes that are left to the allocator."""
        return max(0, self.bytes - self.outside)

    @property
    def plan_bytes(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.allocator_bytes * self._share)

    @property
    def _share(self) -> float:
        return 1.0 - ALLOCATOR_MARGIN - self.shrunk

    def explained(self, error: DoesNotFit) -> DoesNotFit:
        """Return a plan's refusal that also says what the limit has to be."""
        if error.minimum_gpu_bytes is None:
            return error
        needed = ceil(error.minimum_gpu_bytes / self._share)
        needed += int(needed * self._share) < error.minimum_gpu_bytes  # rounded down
        least = needed + self.outside
        besides = f", and {format_bytes(self.outside)} for CUDA and push channels" if self.outside else ""
        return DoesNotFit(
            f"{error} Of gpu_memory_limit {1 - self._share:.0%} stay free for gaps between tensors{besides}: with host "
            f"and disk as they are it has to be at least {least:,} bytes.",
            gpu=least,
            host=error.minimum_host_bytes,
            binds=error.binds,
        )


def outside_bytes(device: torch.device) -> int:
    """Return what this process takes of its GPU besides what the allocator counts: CUDA's part and push channels of all engines.

    On a CPU a limit is a budget for chunks and activations. Channels are in memory that processes share.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    channels = channel_bytes()
    return channels + min(max(taken - channels, CONTEXT_BYTES), MOST_CONTEXT_BYTES)
