"""Kernels of a generated token that begin while the one before them still runs (programmatic dependent launch)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_overlaps: ContextVar[tuple[bool, bool]] = ContextVar("overlaps", default=(False, False))
_LINE = 128
"""Bytes that memory brings to the cache at a time."""
_FETCHED = 20 << 20
"""Bytes of a weight that are brought to the cache early: less than half of it, while other kernels use it."""
_RESIDENT = 8 * 132
"""Programs that a GPU runs at a time."""


def overlaps_on(device: torch.device) -> bool:
    """Return True for a GPU that can launch a kernel early: from Hopper on."""
    on_cuda = device.type == "cuda" and torch.version.hip is None
    return on_cuda and torch.cuda.get_device_capability(device) >= (9, 0)


@contextmanager
def overlapped_launches(*, fetch: bool = False) -> Iterator[None]:
    """Context manager: kernels that can do so are launched early, on a GPU for which :func:`overlaps_on` is True.

    They load weights at once. Before they read anything else, and before they write, they wait for the end of the kernel before
    them. So no kernel may write weights inside.

    Args:
        fetch: they have more weights brought to the GPU's cache before they wait.
    """
    token = _overlaps.set((True, fetch))
    try:
        yield
    finally:
        _overlaps.reset(token)


def early() -> dict[str, Any]:
    """Return the settings for the launch of a kernel that can begin early, which has a constant EARLY."""
    return dict(EARLY=True, launch_pdl=True) if _overlaps.get()[0] else dict(EARLY=False)


def fetched_lines(programs: int, rows: int, row_bytes: int) -> int:
    """Return the lines of 128 bytes of each row that a program brings to the cache early: a power of two, or 0.

    Args:
        programs: of the kernel.
        rows: of weights that each of them reads.
        row_bytes: of a row that it does not load at once.
    """
    if not _overlaps.get()[1]:
        return 0
    most = min(_FETCHED // (min(programs, _RESIDENT) * rows), row_bytes) // _LINE
    return 1 << (most.bit_length() - 1) if most > 0 else 0
