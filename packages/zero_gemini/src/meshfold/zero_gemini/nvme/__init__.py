"""Named blocks of bytes on a file system: large aligned direct I/O, several pieces in flight, one file a rank."""

from __future__ import annotations

from meshfold.zero_gemini.nvme.bench import DiskRates, bench
from meshfold.zero_gemini.nvme.folder import free_bytes
from meshfold.zero_gemini.nvme.layout import aligned_empty
from meshfold.zero_gemini.nvme.store import DiskStore, Pending

__all__ = [
    "DiskRates",
    "DiskStore",
    "Pending",
    "aligned_empty",
    "bench",
    "free_bytes",
]
