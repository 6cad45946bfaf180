"""`DiskStore`: named blocks in one preallocated file a rank, read and written several pieces at a time.

What is guaranteed
    Space is reserved before training. Operations on one block happen in the order they were called, so a read sees the
    write before it; different blocks overlap. A write that failed is told at ``wait()``, and again by `flush`; its block
    cannot be read until a write of it succeeds, nor can one that was never written. A closed store removes its file. The
    file of a killed process is never read: a new store replaces it.
What is not
    The store is scratch: after a crash training resumes from its checkpoint. Blocks carry no checksums, so bytes that
    the disk itself changes, or that another program writes into the file, are not noticed. On file systems that copy on
    write, or compress, reserved space can still run out; that too is an error at ``wait()``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torch import Tensor

from meshfold.mesh import did_you_mean
from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme.file import BlockFile, Direct
from meshfold.zero_gemini.nvme.folder import block_path, disk_error
from meshfold.zero_gemini.nvme.layout import FileLayout
from meshfold.zero_gemini.nvme.memory import bytes_of
from meshfold.zero_gemini.nvme.queues import BlockQueues
from meshfold.zero_gemini.nvme.request import Pending, Request


class DiskStore:
    """Named blocks of bytes in one preallocated file of a rank.

    Args:
        folder: an existing folder, best on a local NVMe disk. The file is ``meshfold-<name>-rank<rank>.blocks``.
        rank: global rank, part of the file's name.
        blocks: name of each block and its length in bytes (any, also 0).
        in_flight: pieces on their way at once (threads).
        chunk_bytes: largest piece, a multiple of 4096. Tensors that do not begin on a page (`aligned_empty` ones do) are
            copied through at most ``in_flight × chunk_bytes`` bytes of memory.
        direct: ``"auto"``: O_DIRECT where the file system has it, else the page cache and a note; True: or an error.
        name: tells several stores of one rank apart.

    Attributes:
        notes: what a person should know: a fallback, a replaced file.

    Raises:
        DiskError: missing, read-only or full; the file is in use or foreign. Nothing is left behind.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int = 0,
        blocks: Mapping[str, int] | None = None,
        in_flight: int = 8,
        chunk_bytes: int = 16 << 20,
        direct: Direct = "auto",
        *,
        name: str = "optimizer",
    ) -> None:
        layout = FileLayout(sizes=dict(blocks or {}), chunk_bytes=chunk_bytes)
        path = block_path(folder, name, rank)
        if in_flight < 1:
            raise DiskError(f"in_flight={in_flight}: at least one piece must be on its way at a time.")
        self._file = BlockFile.create(path, layout, direct=direct)
        self._queues = BlockQueues(self._file, in_flight)

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._file.notes)

    @property
    def direct(self) -> bool:
        """Return whether blocks bypass the page cache."""
        return self._file.direct

    @property
    def blocks(self) -> dict[str, int]:
        """Name of each block and its length in bytes."""
        return dict(self._file.layout.sizes)

    @property
    def file_bytes(self) -> int:
        """Bytes of disk that are reserved."""
        return self._file.layout.file_bytes

    def read(self, name: str, out: Tensor) -> Pending:
        """Start to fill `out`, a contiguous CPU tensor of exactly the block's bytes, of any shape and dtype."""
        return self._submit(name, out, writes=False)

    def write(self, name: str, source: Tensor) -> Pending:
        """Start to write a contiguous CPU tensor of exactly the block's bytes, of any shape and dtype."""
        return self._submit(name, source, writes=True)

    def _submit(self, name: str, tensor: Tensor, *, writes: bool) -> Pending:
        block = self._queues.blocks.get(name)
        if block is None:
            raise DiskError(f"{self.path} has no block {name!r}.{did_you_mean(name, self.blocks)}")
        data = bytes_of(tensor, f"{self.path}, block {name!r}")
        if len(data) != block.place.nbytes:
            raise DiskError(
                f"{self.path}: block {name!r} has {block.place.nbytes} bytes, and the tensor {len(data)}."
            )
        request = Request(block.place, writes, data, tensor)
        self._queues.submit(request)
        return Pending(request)

    def flush(self) -> None:
        """Wait for everything that was started, and until the disk itself has it.

        Raises:
            DiskError: a block's last write failed, or the sync did (then no block can be read before it is written anew).
        """
        self._queues.usable()
        self._queues.drain()
        self._queues.settle()

    def drop_cache(self) -> None:
        """Ask the system to forget what of the file it keeps in memory; direct I/O keeps nothing there. After `flush`."""
        self._queues.usable()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.data, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Wait for everything that was started and remove the file; a second call does nothing.

        Raises:
            DiskError: the file cannot be removed.
        """
        try:
            self._queues.close()
        except OSError as error:
            raise disk_error(f"{self.path} could not be closed: {error.strerror}.", error) from error

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
