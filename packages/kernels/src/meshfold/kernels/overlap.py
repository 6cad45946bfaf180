"""Kernels of a generated token that begin while the one before them still runs (programmatic dependent launch)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_overlaps: ContextVar[bool] = ContextVar("overlaps", default=False)


def overlaps_on(device: torch.device) -> bool:
    """Return True for a GPU that can launch a kernel early: from Hopper on."""
    on_cuda = device.type == "cuda" and torch.version.hip is None
    return on_cuda and torch.cuda.get_device_capability(device) >= (9, 0)


@contextmanager
def overlapped_launches() -> Iterator[None]:
    """Context manager: kernels that can do so are launched early, on a GPU for which :func:`overlaps_on` is True.

    They load weights at once. Before they read anything else, and before they write, they wait for the end of the kernel before
    them. So no kernel may write weights inside.
    """
    token = _overlaps.set(True)
    try:
        yield
    finally:
        _overlaps.reset(token)


def early() -> dict[str, Any]:
    """Return the settings for the launch of a kernel that can begin early, which has a constant EARLY."""
    return dict(EARLY=True, launch_pdl=True) if _overlaps.get() else dict(EARLY=False)
