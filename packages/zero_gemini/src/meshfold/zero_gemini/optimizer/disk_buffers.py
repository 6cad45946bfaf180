"""A few host buffers for state on disk: read ahead, changed, written behind.

The buffers are a small cache of the state used last and expected next. One thread uses a ring at a
time (the worker during a step, the main thread between steps), so there is no lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice

from torch import Tensor, uint8

from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.memory.arena import Block, Memory
from meshfold.zero_gemini.memory.pinned import PAGE_BYTES
from meshfold.zero_gemini.nvme import DiskStore, Pending
from meshfold.zero_gemini.optimizer.master_weights import Plane, views

_PAUSE_SECONDS = 2e-4  # a piece takes about 20 ms


@dataclass(eq=False, kw_only=True)
class Piece:
    """The state of some consecutive elements of a shard: one block on disk.

    Attributes:
        what: whose state it is, in words.
        begin: first element of the shard.
        end: one past the last.
        planes: its contents, one plane after the other.
        nbytes: of its block on disk, whole pages.
        store: where the block is.
        block: its name there.
        written: whether it holds something; zeros if not.
    """

    what: str
    begin: int
    end: int
    planes: tuple[Plane, ...]
    nbytes: int
    store: DiskStore
    block: str
    written: bool = False

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the piece's planes in a buffer of bytes."""
        return views(buffer, self.planes, self.end - self.begin)


@dataclass(eq=False)
class _Buffer:
    """Buffer and its contents, present or pending."""

    block: Block
    tensor: Tensor
    piece: Piece | None = None
    pending: Pending | None = None
    writes: bool = False  # the pending operation is a write
    dirty: bool = False  # changed since it was last written


class Ring:
    """Cache of pieces in host buffers, for one thread at a time.

    Attributes:
        count: buffers; with three, one is read, one changed and one written at a time.
        nbytes: of each; 0 while there is nothing on disk.
    """

    def __init__(self, count: int) -> None:
        self.count, self.nbytes = count, 0
        self._buffers: list[_Buffer] = []
        self._order: deque[Piece] = deque()  # pieces in the order of their use
        self._failed: dict[Piece, DiskError] = {}

    # -- memory -------------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Host-memory bytes accounted for all buffers."""
        return sum(buffer.block.nbytes for buffer in self._buffers)

    def fit(self, nbytes: int, memory: Memory) -> None:
        """Allocate buffers of this size, or none for 0. Call it between steps.

        Raises:
            OutOfBudget: if the host has less left; the buffers are then unchanged.
            DiskError: if their contents could not be written.
        """
        if nbytes == self.nbytes:
            return
        self.flush()
        before = self.nbytes
        self._drop()
        try:
            self._make(nbytes, memory)
        except BaseException:
            self._drop()
            self._make(before, memory)
            raise

    def _make(self, nbytes: int, memory: Memory) -> None:
        # Direct I/O needs page alignment. Pinned blocks are aligned; others get an extra page and are cut.
        extra = 0 if memory.host_arena.pinned else PAGE_BYTES
        for _ in range(self.count if nbytes else 0):
            block = memory.allocate(nbytes + extra, uint8, "disk", "buffers of the disk")
            start = -block.tensor.data_ptr() % PAGE_BYTES
            self._buffers.append(_Buffer(block, block.tensor[start : start + nbytes]))
        self.nbytes = nbytes

    def _drop(self) -> None:
        self._order.clear()
        for buffer in self._buffers:
            if buffer.pending is not None:  # a read ahead
                _end(buffer.pending)
            buffer.tensor = buffer.tensor[:0].clone()
            buffer.block.free()
        self._buffers.clear()
        self.nbytes = 0

    # -- use ----------------------------------------------------------------------------------------------------

    def expect(self, pieces: Iterable[Piece]) -> None:
        """Announce the next uses, in order; reading starts as far as buffers are free."""
        self._order = deque(pieces)
        self.advance()

    @contextmanager
    def open(self, piece: Piece, *, change: bool, now: bool = False) -> Iterator[dict[str, Tensor]]:
        """Context manager: a piece's planes, in memory inside the block.

        Args:
            piece: which.
            change: the caller changes the planes.
            now: start writing when the block ends; else when the buffer is needed for another piece.

        Raises:
            DiskError: if the piece cannot be read, or an earlier one could not be written; a lost piece is reported each time.
        """
        self.check()
        if piece in self._order:
            while self._order.popleft() is not piece:
                pass
        buffer = next((buffer for buffer in self._buffers if buffer.piece is piece), None)
        if buffer is None:
            buffer = self._load(self._free(), piece)
        # Wait for a read to arrive, or for a write before changing its data. Operations that end in the meantime free buffers.
        while buffer.pending is not None and not buffer.pending.done():
            self.advance(but=buffer)
            time.sleep(_PAUSE_SECONDS)
        self._collect(buffer)
        buffer.dirty |= change
        self.advance(but=buffer)
        yield piece.views(buffer.tensor)
        if now and buffer.dirty:
            self._write(buffer)
        self.advance()

    def advance(self, but: _Buffer | None = None) -> None:
        """Start reading ahead as far as buffers are free. Does not wait."""
        window = [*islice(self._order, self.count)]
        for piece in window:
            if any(buffer.piece is piece for buffer in self._buffers):
                continue
            free = None
            for buffer in self._buffers:
                if buffer is but or buffer.piece in window:
                    continue
                if buffer.dirty:
                    self._write(buffer)
                if buffer.pending is None or buffer.pending.done():
                    free = buffer
                    break
            if free is None:
                return
            self._collect(free)
            self._load(free, piece)

    def settle(self) -> None:
        """Wait for pending writes.

        Raises:
            DiskError: if a write failed.
        """
        for buffer in self._buffers:
            if buffer.writes:
                self._collect(buffer)
        self.check()

    def flush(self) -> None:
        """Write all changes, and wait for them.

        Raises:
            DiskError: if a write failed.
        """
        for buffer in self._buffers:
            if buffer.dirty:
                self._write(buffer)
        self.settle()

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Discard pieces, with their buffers' contents and errors."""
        gone = set(pieces)
        self._order = deque(piece for piece in self._order if piece not in gone)
        for buffer in self._buffers:
            if buffer.piece in gone:
                if buffer.pending is not None:
                    _end(buffer.pending)
                buffer.piece = buffer.pending = None
                buffer.writes = buffer.dirty = False
        for piece in gone:
            self._failed.pop(piece, None)

    def close(self) -> None:
        """Release the memory and its contents."""
        self._failed.clear()
        self._drop()

    def check(self) -> None:
        """Check that no state is lost.

        Raises:
            DiskError: if some state is lost.
        """
        for buffer in self._buffers:
            if buffer.writes and buffer.pending is not None and buffer.pending.done():
                self._collect(buffer)
        for error in self._failed.values():
            raise error

    # -- within -------------------------------------------------------------------------------------------------

    def _free(self) -> _Buffer:
        """Return a buffer for an unexpected piece: an idle one, else the one whose contents are needed last."""
        place = {piece: index for index, piece in enumerate(islice(self._order, self.count))}

        def trouble(buffer: _Buffer) -> tuple[int, bool, bool]:
            soon = -1 if buffer.piece is None else self.count - place.get(buffer.piece, self.count)
            return soon, buffer.dirty, buffer.pending is not None and not buffer.pending.done()

        buffer = min(self._buffers, key=trouble)
        if buffer.dirty:
            self._write(buffer)
        self._collect(buffer)
        return buffer

    def _load(self, buffer: _Buffer, piece: Piece) -> _Buffer:
        buffer.piece, buffer.dirty = piece, False
        if piece.written:
            buffer.pending = piece.store.read(piece.block, buffer.tensor[: piece.nbytes])
            buffer.writes = False
        else:
            buffer.tensor[: piece.nbytes].zero_()
        return buffer

    def _write(self, buffer: _Buffer) -> None:
        self._collect(buffer)
        piece = buffer.piece
        if piece is not None:
            buffer.pending = piece.store.write(piece.block, buffer.tensor[: piece.nbytes])
            buffer.writes = piece.written = True
        buffer.dirty = False

    def _collect(self, buffer: _Buffer) -> None:
        """Wait for a buffer's pending operation."""
        pending, piece = buffer.pending, buffer.piece
        if pending is None or piece is None:
            return
        doing = "written to" if buffer.writes else "read from"
        try:
            pending.wait()
        except DiskError as error:
            lost = DiskError(
                f"the optimizer state of {piece.what} could not be {doing} disk, so training cannot continue from here: "
                f"{error} Fix the cause, and resume from the last checkpoint."
            )
            lost.errno = error.errno
            self._failed[piece] = lost
            buffer.piece = None
            raise lost from error
        finally:
            buffer.pending, buffer.writes = None, False


def _end(pending: Pending) -> None:
    """Wait for an operation, whether it fails or not."""
    with suppress(DiskError):
        pending.wait()
