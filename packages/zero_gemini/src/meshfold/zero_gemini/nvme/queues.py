"""Queues of disk requests: in order on each block, as many blocks and pieces at once as there are threads."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme.file import BlockFile
from meshfold.zero_gemini.nvme.folder import disk_error
from meshfold.zero_gemini.nvme.layout import BlockPlace
from meshfold.zero_gemini.nvme.request import Request


@dataclass(eq=False)
class Block:
    """A block of the file. `written`: a write of it has succeeded, so it may be read."""

    place: BlockPlace
    written: bool = False
    queue: deque[Request] = field(default_factory=deque)
    torn: str = ""  # why its last write failed; words, as an error would hold on to its frames' tensors


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
        # If nobody closes the store its file goes with it, unless the process is killed. Work on its way keeps us alive.
        self._finalizer = weakref.finalize(self, file.release, owner=self._owner)

    def usable(self) -> None:
        """Raise unless the store is open, and in the process that opened it."""
        if os.getpid() != self._owner:
            raise DiskError(f"{self.path} belongs to process {self._owner}: a forked child cannot use it.")
        if self._closed:
            raise DiskError(f"{self.path}: the store is closed.")

    def submit(self, request: Request) -> None:
        block = self.blocks[request.place.name]
        self.usable()  # before the lock, which a forked child may have got in its locked state
        with self._lock:
            self.usable()
            block.queue.append(request)
            if len(block.queue) == 1:
                self._launch(block)

    def _launch(self, block: Block) -> None:
        """Start the requests at the head of the queue, under the lock; the last piece of each comes back here."""
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
                except RuntimeError as error:  # the interpreter is on its way out
                    request.error = DiskError(f"{self.path}: block {block.place.name!r}: {error}.")
                    request.left -= len(pieces) - index
                    break
            if request.left:
                return
            self._finish(block, request)

    def _piece(self, block: Block, request: Request, start: int, length: int) -> None:
        place, error = block.place, None
        if request.error is None:  # once a piece has failed the others are not worth their time
            try:
                self.file.move(
                    request.data[start : start + length], place.offset + start, write=request.writes
                )
            except OSError as failure:
                error = disk_error(
                    f"{self.path}: {'writing' if request.writes else 'reading'} block {place.name!r} failed at byte "
                    f"{start} of {place.nbytes}: {failure.strerror}.",
                    failure,
                )
            except BaseException as failure:  # no waiter may be left waiting
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
        request.tensor = None  # the caller's memory is the caller's again
        request.data = request.data[:0].copy()
        request.finished.set()
        self._idle.notify_all()

    def drain(self) -> None:
        """Return when nothing is on its way."""
        with self._idle:
            self._idle.wait_for(lambda: not any(block.queue for block in self.blocks.values()))

    def settle(self) -> None:
        """Sync, with nothing on its way; raise if a block is not whole in the file."""
        torn = [(name, block.torn) for name, block in self.blocks.items() if block.torn]
        if torn:
            name, error = torn[0]
            raise DiskError(
                f"{self.path}: {len(torn)} blocks did not reach the disk, the first is {name!r}: {error}"
            )
        try:
            self.file.sync()
        except OSError as cause:
            failure = disk_error(f"{self.path} could not be synced to disk: {cause.strerror}.", cause)
            with self._lock:  # the system says this once, and does not say which bytes it dropped
                for block in self.blocks.values():
                    block.torn = str(failure)
            raise failure from cause

    def close(self) -> None:
        """Finish what is on its way and remove the file. A second call does nothing."""
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
    """A pool whose threads all run: a system that has no more threads says so before training."""
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
        raise DiskError(
            f"{file.path}: no threads for in_flight={in_flight} ({error}). Take fewer."
        ) from error
    return pool
