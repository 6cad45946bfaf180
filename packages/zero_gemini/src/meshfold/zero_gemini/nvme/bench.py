"""Benchmark of a folder's disk: the write and read rates that the planner uses."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme.layout import aligned_empty
from meshfold.zero_gemini.nvme.store import DiskStore, Pending


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """Measured rates in bytes per second, of `nbytes` bytes each way; `direct`: without the page cache."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    nbytes: int
    direct: bool


def bench(
    folder: str | os.PathLike[str], nbytes: int = 1 << 30, *, in_flight: int = 8, chunk_bytes: int = 16 << 20
) -> DiskRates:
    """Write a file of at least `nbytes` bytes once to claim its blocks, then time writing it again and reading it back.

    Needs ``nbytes`` of disk and ``in_flight × chunk_bytes`` of memory; leaves nothing behind. Without direct I/O the file is
    removed from the page cache before reading, so the disk is measured (on memory file systems: memory).

    Raises:
        DiskError: as `DiskStore`.
    """
    if nbytes < 1:
        raise DiskError(f"bench(nbytes={nbytes}): at least one byte must be moved.")
    names = [str(index) for index in range(-(-nbytes // chunk_bytes))]
    sizes = dict.fromkeys(names, chunk_bytes)
    buffers = [aligned_empty(chunk_bytes).random_() for _ in range(in_flight)]
    with DiskStore(folder, 0, sizes, in_flight, chunk_bytes, name=f"bench-{secrets.token_hex(8)}") as store:

        def write_all() -> None:
            _stream(store.write, names, buffers)
            store.flush()

        write_all()
        writing = _seconds(write_all)
        store.drop_cache()
        reading = _seconds(lambda: _stream(store.read, names, buffers))
        total = len(names) * chunk_bytes
        return DiskRates(
            write_bytes_per_s=total / writing,
            read_bytes_per_s=total / reading,
            nbytes=total,
            direct=store.direct,
        )


def _stream(start: Callable[[str, Tensor], Pending], names: Iterable[str], buffers: list[Tensor]) -> None:
    running: deque[Pending] = deque()
    for index, name in enumerate(names):
        if len(running) == len(buffers):
            running.popleft().wait()
        running.append(start(name, buffers[index % len(buffers)]))
    for pending in running:
        pending.wait()


def _seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
