"""The transport of ranks on the CPUs of one machine: files in shared memory that all of them have mapped.

It is the same protocol as between GPUs, for tests without a GPU and for models that run on CPUs. A wait ends at the limit of the
group's collectives, or once the watchdog stops it. The waiting call then names the missing rank.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from meshfold.mesh.collectives.operations import all_gather_object, barrier
from meshfold.mesh.collectives.push import epochs
from meshfold.mesh.collectives.push.transport import FLAG_BYTES, Stream
from meshfold.mesh.group import Group
from meshfold.mesh.processes import groups

_CPU = torch.device("cpu")
_SPINS = 200  # looks at a flag before the process sleeps between them


def missing() -> str:
    """Return why this machine cannot use it; empty if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"a {platform.machine()} CPU may show a flag before the data that it stands for"
    return ""


class HostTransport:
    """Memory of a group's ranks, each in a file that its peers map."""

    def __init__(self, group: Group, slot_bytes: int) -> None:
        """Args:
        group: whose ranks are processes of one machine; all of them must call.
        slot_bytes: bytes of each slot.
        """
        self.index, self.size, self.slot_bytes = group.index, group.size, slot_bytes
        self._group = group
        self._length = epochs.SLOTS * slot_bytes + FLAG_BYTES
        path = _folder() / f"meshfold-push-{uuid.uuid4().hex}"
        with open(path, "wb") as file:
            file.truncate(self._length)
        try:
            paths = all_gather_object(str(path), group, _CPU)
            self._maps = [_mapped(Path(found), self._length) for found in paths]
            barrier(group, _CPU)
        finally:
            with suppress(OSError):  # mapped memory stays until the last process unmaps it
                path.unlink()
        self._bytes = [torch.frombuffer(found, dtype=torch.uint8) for found in self._maps]
        start = epochs.SLOTS * slot_bytes
        self._flags = [memoryview(found)[start:].cast("I") for found in self._maps]

    def memory(self, rank: int, slot: int) -> Tensor:
        return self._bytes[rank][slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def write(self, rank: int, slot: int, start: int, block: Tensor, first: int, length: int) -> None:
        self.memory(rank, slot)[start : start + length] = as_bytes(block)[first : first + length]

    def read(self, slot: int, start: int, out: Tensor, first: int, length: int) -> None:
        as_bytes(out)[first : first + length] = self.memory(self.index, slot)[start : start + length]

    def copy(self, block: Tensor, out: Tensor, first: int) -> None:
        source = as_bytes(block)
        as_bytes(out)[first : first + source.numel()] = source

    def raise_flag(self, rank: int, place: int, number: int) -> None:
        self._flags[rank][place] = epochs.word(number)

    def await_flag(self, place: int, number: int) -> None:
        """Wait for a flag.

        Raises:
            RuntimeError: if it is not raised in time.
        """
        flags, looks = self._flags[self.index], 0
        end = time.monotonic() + groups.call_limit().total_seconds()
        while not epochs.is_reached(flags[place], number):
            looks += 1
            if looks < _SPINS:
                continue
            time.sleep(5e-5)
            if groups.is_broken_off() or time.monotonic() > end:
                rank = self._group.ranks[place % self.size]
                what = "written its block of" if place < self.size else "read"
                raise RuntimeError(
                    f"rank {rank} has not {what} push {number} in time; its flag stands at {flags[place]}"
                )

    def follow(self, *streams: Stream) -> None:
        """Do nothing: what the process did before is done."""

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        yield

    def handle(self) -> None:
        return None

    def mark(self) -> None:
        return None

    def after(self, point: torch.cuda.Event | None) -> None:
        """Do nothing: everything is done when it returns."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as its bytes."""
    return tensor.view(-1).view(torch.uint8)


def _folder() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _mapped(path: Path, length: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), length)
