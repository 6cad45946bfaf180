"""Memory that tensors on a CPU free: the process keeps it for those of the next step."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt
_NEVER = -1


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory, and return True if it does from now on.

    By default glibc gives large freed blocks back to the system, so each step of training gets activations and gradients anew:
    the kernel clears every page of 4 KiB when it is first written, for some 2 µs. That is up to a tenth of a step, and whether a
    step pays it depends on where small blocks lie. Kept, a process holds as much as at its peak.

    Settings that a user has made in the environment stay. Without glibc nothing happens.
    """
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not Linux, or another C library
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_MMAP_MAX, 0))
