"""The CUDA caching allocator of torch: held to a limit, and told to leave no gaps."""

from __future__ import annotations

import os

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def limit_allocator(device: torch.device, limit: int) -> None:
    """Let this process take no more than ``limit`` bytes of a GPU, so that a smaller card is what it sees."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)


def grow_segments() -> bool:
    """Let the allocator grow and shrink its segments from now on, in the whole process: whether it does.

    Chunks come and go in sizes of their own between activations. In segments of fixed sizes that leaves gaps (8 % of an
    H200 with a model of 13B parameters), and what a plan may use runs out although it is there. Where the environment
    configures the allocator it is left as it is.
    """
    if any(os.environ.get(name) for name in _VARIABLES):
        return False
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if tell is None:
        tell = torch._C._cuda_cudaCachingAllocator_set_allocator_settings  # type: ignore[attr-defined]
    tell("expandable_segments:True")
    return True
