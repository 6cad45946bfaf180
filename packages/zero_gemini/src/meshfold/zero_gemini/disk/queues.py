"""Which request runs when: one after the other on each block, as many blocks and pieces at once as there are threads."""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..errors import DiskError
from .file import BlockFile
from .folder import disk_error
from .layout import BlockPlace, pack_record
from .request import Request


@dataclass(eq=False)
class Block:
    """What is known of a block: `generation` counts whole writes, 0 while it holds nothing that may be read."""

    place: BlockPlace
    generation: int = 0
    checksums: list[int] = field(default_factory=list)
    queue: deque[Request] = field(default_factory=deque)
    torn: str = ""  # why its last write failed; words, as an error would hold on to its frames' tensors


class BlockQueues:
    """The queues of all blocks of a file, and the threads that work on them.

    `known`: number of times each block was written and checksums of all pieces, of a file that existed.
    """

    def __init__(
        self, file: BlockFile, in_flight: int, known: tuple[list[int], list[int]] | None = None
    ) -> None:
        self.file = file
        self.path = file.path
        self.blocks = {
            name: Block(place, checksums=[0] * len(place.pieces))
            for name, place in file.layout.places().items()
        }
        if known is not None:
            generations, checksums = known
            for block, generation in zip(self.blocks.values(), generations, strict=True):
                pieces = len(block.place.pieces)
                block.generation, block.checksums = generation, checksums[:pieces]
                checksums = checksums[pieces:]
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._owner = os.getpid()
        self._closed = False
        self._pool = _started_pool(in_flight, file)
        # If nobody closes the store its file goes with it, unless the process is killed. Work on its way keeps us alive.
        self._finalizer = weakref.finalize(self, file.release, remove=True, owner=self._owner)

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
            if not request.writes and (block.torn or block.generation == 0):
                why = f"the last write of it failed: {block.torn}" if block.torn else "it was never written"
                request.error = DiskError(f"{self.path}: block {block.place.name!r} cannot be read: {why}")
                pieces = []
            request.left = len(pieces)
            for index, (start, length) in enumerate(pieces):
                try:
                    self._pool.submit(self._piece, block, request, index, start, length)
                except RuntimeError as error:  # the interpreter is on its way out
                    request.error = DiskError(f"{self.path}: block {block.place.name!r}: {error}.")
                    request.left -= len(pieces) - index
                    break
            if request.left:
                return
            self._finish(block, request)

    def _piece(self, block: Block, request: Request, index: int, start: int, length: int) -> None:
        place, error = block.place, None
        if request.error is None:  # once a piece has failed the others are not worth their time
            try:
                self._move(block, request, index, start, length)
            except DiskError as failure:
                error = failure.with_traceback(None)
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

    def _move(self, block: Block, request: Request, index: int, start: int, length: int) -> None:
        data, verify = request.data[start : start + length], self.file.header.verify
        if verify and request.writes:
            block.checksums[index] = zlib.crc32(data.data)
        self.file.move(data, block.place.offset + start, write=request.writes)
        if verify and not request.writes and zlib.crc32(data.data) != block.checksums[index]:
            raise DiskError(
                f"{self.path}: block {block.place.name!r} did not come back as it was written (bytes {start} to "
                f"{start + length}): the disk is failing, or another program wrote into the file."
            )

    def _finish(self, block: Block, request: Request) -> None:
        if request.writes:
            block.torn = str(request.error or "")
            block.generation += request.error is None
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

    def close(self, *, remove: bool) -> None:
        """Finish what is on its way, keep or remove the file, and let go of it. A second call does nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.drain()
        self._pool.shutdown()
        try:
            if not remove:
                self.settle()
                checksums = [checksum for block in self.blocks.values() for checksum in block.checksums]
                self.file.finish(pack_record([block.generation for block in self.blocks.values()], checksums))
        finally:
            self._finalizer.detach()
            self.file.release(remove=remove)


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
        file.release(remove=True)
        raise DiskError(
            f"{file.path}: no threads for in_flight={in_flight} ({error}). Take fewer."
        ) from error
    return pool
