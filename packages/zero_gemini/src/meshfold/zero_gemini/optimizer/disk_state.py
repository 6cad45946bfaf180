"""Optimizer state on disk: its blocks in files of this rank, and its host buffers.

A chunk's state there is cut into *pieces* of at most ``piece_bytes``, each with all planes of its elements. One read then gets
everything that their step needs, and the buffers' memory does not grow with chunks. Weights are not on disk: they are
published to the model every step.

Room is reserved before anything starts: :meth:`DiskPlanes.reserve` makes one file for all chunks that are about to go to disk.
State that is moved there later gets room that others left, or another file, which is created before anything moves. Reserved room
stays reserved until the end. The files are scratch: files of killed processes are removed first. Several engines, of one process or
many, may use one folder: each file is locked by its process, and takes a free name.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from meshfold.zero_gemini.errors import DiskError, MemoryPlanError
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.nvme import DiskStore
from meshfold.zero_gemini.nvme.folder import block_path, is_others, sweep
from meshfold.zero_gemini.nvme.layout import ALIGN, round_up
from meshfold.zero_gemini.optimizer.disk_buffers import Piece, Ring
from meshfold.zero_gemini.optimizer.master_weights import BLOCK_ELEMS, Plane, lie

Slot = tuple[DiskStore, str]


@dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """Settings of optimizer state on disk.

    Attributes:
        folder: an existing folder, best on a local NVMe disk.
        rank: the global rank: each has files of its own.
        name: how the names of its files begin.
        buffers: pieces in memory at a time.
        piece_bytes: the most bytes of a piece.
        io_bytes: the most bytes of one system call, a multiple of 4096.
        in_flight: system calls under way at a time.

    Raises:
        MemoryPlanError: for no buffers, or pieces that are too small.
    """

    folder: str | os.PathLike[str]
    rank: int
    name: str = "optimizer"
    buffers: int = 3
    piece_bytes: int = 64 << 20
    io_bytes: int = 8 << 20
    in_flight: int = 8

    def __post_init__(self) -> None:
        if self.buffers < 1:
            raise MemoryPlanError(f"buffers={self.buffers}: give at least one buffer for state on disk")
        if self.piece_bytes < ALIGN:
            raise MemoryPlanError(f"piece_bytes={self.piece_bytes}: a piece has {ALIGN} bytes at least")


class DiskPlanes:
    """The files of one rank and the buffers.

    Attributes:
        ring: the buffers.
    """

    def __init__(self, settings: DiskSettings) -> None:
        self.settings = settings
        self.ring = Ring(settings.buffers)
        self._stores: list[DiskStore] = []
        self._notes: list[str] = []
        self._free: dict[int, list[Slot]] = {}  # by size in bytes
        self._used: Counter[int] = Counter()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the user: no direct I/O, files of a killed process that were removed."""
        return tuple(self._notes)

    @property
    def file_bytes(self) -> int:
        """Bytes of disk that are reserved."""
        return sum(store.file_bytes for store in self._stores)

    def reserve(self, chunks: Iterable[tuple[tuple[Plane, ...], int]]) -> None:
        """Reserve room for the state of chunks, from their planes and the elements of their shards, before any is made.

        Raises:
            DiskError: if there is less room, or the folder cannot be used; nothing has changed then.
        """
        wanted = Counter(nbytes for planes, elements in chunks for _, _, nbytes in self._cuts(planes, elements))
        missing = {nbytes: count - len(self._free.get(nbytes, ())) for nbytes, count in wanted.items()}
        sizes = [nbytes for nbytes, count in missing.items() for _ in range(count)]
        if not sizes:
            return
        if not self._stores:
            self._say(sweep(self.settings.folder))
        store = self._made({str(index): nbytes for index, nbytes in enumerate(sizes)})
        self._stores.append(store)
        self._say(store.notes)
        for index, nbytes in enumerate(sizes):
            self._free.setdefault(nbytes, []).append((store, str(index)))

    def _made(self, sizes: dict[str, int]) -> DiskStore:
        """Create a file of those blocks under the first free name: other engines may use the folder."""
        settings = self.settings
        for number in count():
            name = f"{settings.name}-{number}" if number else settings.name
            try:
                return DiskStore(
                    settings.folder, settings.rank, sizes, settings.in_flight, settings.io_bytes, name=name
                )
            except DiskError as error:
                if not is_others(error, block_path(settings.folder, name, settings.rank)):
                    raise
        raise AssertionError("count() has no end")

    def _say(self, notes: Iterable[str]) -> None:
        """Add a note; the first rank also prints a warning, once."""
        for note in notes:
            self._notes.append(note)
            if self.settings.rank == 0:
                warnings.warn(f"State on disk: {note}", stacklevel=2)

    def take(self, what: str, planes: tuple[Plane, ...], elements: int, memory: Memory) -> list[Piece]:
        """Return room for a chunk's state, zeros at first, and make buffers that are large enough.

        Raises:
            DiskError: as :meth:`reserve`.
            OutOfBudget: if the host has no memory for the buffers; nothing has changed then.
        """
        self.reserve([(planes, elements)])
        cuts = self._cuts(planes, elements)
        self.ring.fit(max([self.ring.nbytes, *(nbytes for _, _, nbytes in cuts)]), memory)
        pieces = []
        for begin, end, nbytes in cuts:
            store, block = self._free[nbytes].pop()
            self._used[nbytes] += 1
            pieces.append(
                Piece(what=what, begin=begin, end=end, planes=planes, nbytes=nbytes, store=store, block=block)
            )
        return pieces

    def give_back(self, pieces: Iterable[Piece], memory: Memory) -> None:
        """Forget pieces: their room is free for others, and buffers shrink as far as possible."""
        pieces = list(pieces)
        self.ring.forget(pieces)
        for piece in pieces:
            self._free[piece.nbytes].append((piece.store, piece.block))
            self._used[piece.nbytes] -= 1
        self.ring.fit(max((nbytes for nbytes, count in self._used.items() if count), default=0), memory)

    def close(self) -> None:
        """Remove the files, and release the buffers."""
        self.ring.close()
        for store in self._stores:
            store.close()
        self._stores.clear()
        self._free.clear()
        self._used.clear()

    def _cuts(self, planes: tuple[Plane, ...], elements: int) -> list[tuple[int, int, int]]:
        """Return each piece's range of elements and bytes on disk; pieces are as equal as possible."""
        _, all_bytes = lie(planes, elements)
        count = max(1, -(-all_bytes // self.settings.piece_bytes))
        length = -(-elements // (count * BLOCK_ELEMS)) * BLOCK_ELEMS
        found = []
        for begin in range(0, elements, length):
            end = min(begin + length, elements)
            found.append((begin, end, round_up(lie(planes, end - begin)[1])))
        return found
