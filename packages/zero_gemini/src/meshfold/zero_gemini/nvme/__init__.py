"""Named blocks of bytes on a file system: large aligned direct I/O, several pieces in flight, one file a rank."""

from __future__ import annotations

from .bench import DiskRates, bench
from .folder import free_bytes
from .memory import aligned_empty
from .request import Pending
from .store import DiskStore

__all__ = [
    "DiskRates",
    "DiskStore",
    "Pending",
    "aligned_empty",
    "bench",
    "free_bytes",
]
