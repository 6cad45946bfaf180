"""`DiskStore`: named blocks in one preallocated file a rank, read and written several pieces at a time.

Guarantees:

- Space is reserved before training.
- Operations on one block happen in the order of their calls, so a read sees the write before it. Different blocks overlap.
- A failed write raises at ``wait()``, and again in `flush`. A block cannot be read while its last write has failed, or before it
  was written.
- A closed store removes its file. The file of a killed process is never read: a new store replaces it.

No guarantees:

- The store is scratch: after a crash training resumes from its checkpoint.
- Blocks carry no checksums: bytes that the disk changes, or that another program writes into the file, are not noticed.
- On file systems that copy on write, or compress, reserved space can still run out; that too is an error at ``wait()``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from torch import Tensor

from meshfold.mesh import did_you_mean
from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme.file import BlockFile, Direct
from meshfold.zero_gemini.nvme.folder import block_path, disk_error
from meshfold.zero_gemini.nvme.layout import BlockPlace, Bytes, FileLayout, bytes_of


class DiskStore:
    """Named blocks of bytes in one preallocated file of a rank.

    Args:
        folder: an existing folder, best on a local NVMe disk. The file is ``meshfold-<name>-rank<rank>.blocks``.
        rank: global rank, part of the file's name.
        blocks: name of each block and its length in bytes (any, also 0).
        in_flight: pieces on their way at once (threads).
        chunk_bytes: largest piece, a multiple of 4096. Tensors that do not begin on a page (`aligned_empty` ones do) are
            copied through at most ``in_flight × chunk_bytes`` bytes of memory.
        direct: ``"auto"``: O_DIRECT if the file system supports it, otherwise the page cache and a note; True: or an error.
        name: distinguishes several stores of one rank.

    Attributes:
        notes: messages for the user: a fallback, a replaced file.

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
            raise DiskError(f"in_flight={in_flight}: give at least 1, the number of pieces in flight.")
        self._file = BlockFile.create(path, layout, direct=direct)
        self._queues = BlockQueues(self._file, in_flight)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._file.path

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._file.notes)

    @property
    def direct(self) -> bool:
        """Return True if blocks bypass the page cache."""
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
                f"{self.path}: block {name!r} has {block.place.nbytes} bytes, but the tensor has {len(data)}."
            )
        request = Request(block.place, writes, data, tensor)
        self._queues.submit(request)
        return Pending(request)

    def flush(self) -> None:
        """Wait for everything that was started, and for the disk itself.

        Raises:
            DiskError: a block's last write failed, or the sync did (then no block can be read before it is written again).
        """
        self._queues.usable()
        self._queues.drain()
        self._queues.settle()

    def drop_cache(self) -> None:
        """Ask the system to drop the file from its page cache; direct I/O does not use it. Call it after `flush`."""
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


@dataclass(eq=False)
class Block:
    """A block of the file. `written`: a write of it has succeeded, so it may be read."""

    place: BlockPlace
    written: bool = False
    queue: deque[Request] = field(default_factory=deque)
    torn: str = ""  # why its last write failed; a string, since an exception keeps its frames' tensors alive


class BlockQueues:
    """The queues of all blocks of a file, and the threads that work on them."""

    def __init__(self, file: BlockFile, in_flight: int) -> None:
        self.file = file
        self.path = file.path
        self.blocks = {name: Block(place) for name, place in file.layout.places().items()}
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._owner = os.getpid()
        self._closed = False
        self._pool = _started_pool(in_flight, file)
        # A store that is never closed removes its file when it is collected, unless the process is killed. Pending requests keep
        # the store alive.
        self._finalizer = weakref.finalize(self, file.release, owner=self._owner)

    def usable(self) -> None:
        """Raise unless the store is open, and in the process that opened it."""
        if os.getpid() != self._owner:
            raise DiskError(f"{self.path} belongs to process {self._owner}: a forked child cannot use it.")
        if self._closed:
            raise DiskError(f"{self.path}: the store is closed.")

    def submit(self, request: Request) -> None:
        block = self.blocks[request.place.name]
        self.usable()  # before the lock: a forked child may have inherited it locked
        with self._lock:
            self.usable()
            block.queue.append(request)
            if len(block.queue) == 1:
                self._launch(block)

    def _launch(self, block: Block) -> None:
        """Start the requests at the head of the queue, under the lock. The last piece of each calls this again."""
        while block.queue:
            request = block.queue[0]
            pieces = block.place.pieces
            if not request.writes and (block.torn or not block.written):
                why = f"the last write of it failed: {block.torn}" if block.torn else "it was never written"
                request.error = DiskError(f"{self.path}: block {block.place.name!r} cannot be read: {why}")
                pieces = []
            request.left = len(pieces)
            for index, (start, length) in enumerate(pieces):
                try:
                    self._pool.submit(self._piece, block, request, start, length)
                except RuntimeError as error:  # the interpreter is shutting down
                    request.error = DiskError(f"{self.path}: block {block.place.name!r}: {error}.")
                    request.left -= len(pieces) - index
                    break
            if request.left:
                return
            self._finish(block, request)

    def _piece(self, block: Block, request: Request, start: int, length: int) -> None:
        place, error = block.place, None
        if request.error is None:  # after a failed piece, skip the rest
            try:
                self.file.move(request.data[start : start + length], place.offset + start, write=request.writes)
            except OSError as failure:
                error = disk_error(
                    f"{self.path}: {'writing' if request.writes else 'reading'} block {place.name!r} failed at byte "
                    f"{start} of {place.nbytes}: {failure.strerror}.",
                    failure,
                )
            except BaseException as failure:  # wake the waiters
                error = DiskError(f"{self.path}: block {place.name!r} failed: {failure!r}.")
        with self._lock:
            request.error = request.error or error
            request.left -= 1
            if request.left == 0:
                self._finish(block, request)
                self._launch(block)

    def _finish(self, block: Block, request: Request) -> None:
        if request.writes:
            block.torn = str(request.error or "")
            block.written |= request.error is None
        block.queue.popleft()
        request.tensor = None  # release the caller's tensor
        request.data = request.data[:0].copy()
        request.finished.set()
        self._idle.notify_all()

    def drain(self) -> None:
        """Wait until nothing is pending."""
        with self._idle:
            self._idle.wait_for(lambda: not any(block.queue for block in self.blocks.values()))

    def settle(self) -> None:
        """Sync, with nothing pending; raise if a block is incomplete in the file."""
        torn = [(name, block.torn) for name, block in self.blocks.items() if block.torn]
        if torn:
            name, error = torn[0]
            raise DiskError(f"{self.path}: {len(torn)} blocks did not reach the disk, the first is {name!r}: {error}")
        try:
            self.file.sync()
        except OSError as cause:
            failure = disk_error(f"{self.path} could not be synced to disk: {cause.strerror}.", cause)
            with self._lock:  # reported once, without saying which bytes were lost
                for block in self.blocks.values():
                    block.torn = str(failure)
            raise failure from cause

    def close(self) -> None:
        """Finish pending operations and remove the file. A second call does nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.drain()
        self._pool.shutdown()
        self._finalizer.detach()
        self.file.release()


def _started_pool(in_flight: int, file: BlockFile) -> ThreadPoolExecutor:
    """Return a pool with all threads started, so that a lack of threads shows before training."""
    pool = ThreadPoolExecutor(in_flight, thread_name_prefix="meshfold-disk")
    together = threading.Barrier(in_flight + 1)
    try:
        for _ in range(in_flight):
            pool.submit(together.wait)
        together.wait()
    except RuntimeError as error:
        together.abort()
        pool.shutdown(wait=False)
        file.release()
        raise DiskError(f"{file.path}: no threads for in_flight={in_flight} ({error}). Use fewer.") from error
    return pool


@dataclass(eq=False)
class Request:
    """A read or write of one whole block, done in pieces. `tensor` keeps the memory of `data` alive."""

    place: BlockPlace
    writes: bool
    data: Bytes
    tensor: Tensor | None
    left: int = 0
    error: DiskError | None = None
    finished: threading.Event = field(default_factory=threading.Event)


class Pending:
    """A read or write that was started. Until `wait` returns, do not change a source or read a target."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def done(self) -> bool:
        """Return True if `wait` would return, or raise, at once."""
        return self._request.finished.is_set()

    def wait(self) -> None:
        """Wait until the block is in the file (write) or in the tensor (read). May be called again.

        Raises:
            DiskError: names the file, the block and the reason (its ``errno`` is that of the system). The source of a
                failed write is untouched; the target of a failed read holds anything.
        """
        self._request.finished.wait()
        if self._request.error is not None:
            raise self._request.error
