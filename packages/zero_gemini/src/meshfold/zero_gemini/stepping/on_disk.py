"""Optimizer state on disk: room for it in block files of this rank, and the buffers it passes through.

A chunk's state there is cut into *pieces* of at most ``piece_bytes``, each with all planes of its elements, so that one
read brings all that a step of them needs, and the buffers' memory does not grow with chunks. Weights are not on disk: the model is
shown them every step.

Room is reserved before anything starts: :meth:`DiskPlanes.reserve` makes one file for all chunks that are about to go to
disk. What is moved there later gets the room that others left, or a new file beside the first, made before anything
moves; room that was reserved stays so until the end. The files are scratch: what a dead process left is replaced.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshfold.zero_gemini.disk import DiskStore
from meshfold.zero_gemini.disk.memory import ALIGN, round_up
from meshfold.zero_gemini.errors import DiskError, MemoryPlanError
from meshfold.zero_gemini.memory import Memory
from meshfold.zero_gemini.stepping.planes import BLOCK_ELEMS, Plane, lie
from meshfold.zero_gemini.stepping.ring import Piece, Ring

Slot = tuple[DiskStore, str]


@dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """Where and how optimizer state lies on disk.

    Attributes:
        folder: an existing folder, best on a local NVMe disk.
        rank: the global rank: each has files of its own.
        name: tells the files of several engines of one process apart.
        buffers: pieces in memory at a time.
        piece_bytes: the most bytes of a piece.
        io_bytes: the most bytes of one system call, a multiple of 4096; several are on their way at a time.
        in_flight: how many.

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
            raise MemoryPlanError(f"buffers={self.buffers}: state on disk passes through at least one")
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
        self._free: dict[int, list[Slot]] = {}  # by their bytes
        self._used: Counter[int] = Counter()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know: no direct I/O, a file that was replaced."""
        return tuple(note for store in self._stores for note in store.notes)

    @property
    def file_bytes(self) -> int:
        """Bytes of disk that are reserved."""
        return sum(store.file_bytes for store in self._stores)

    def reserve(self, chunks: Iterable[tuple[tuple[Plane, ...], int]]) -> None:
        """Have room for the state of chunks, from their planes and the elements of their shards, before any is made.

        Raises:
            DiskError: if there is not as much room, or the folder cannot be used; nothing has changed then.
        """
        wanted = Counter(
            nbytes for planes, elements in chunks for _, _, nbytes in self._cuts(planes, elements)
        )
        missing = {nbytes: count - len(self._free.get(nbytes, ())) for nbytes, count in wanted.items()}
        sizes = [nbytes for nbytes, count in missing.items() for _ in range(count)]
        if not sizes:
            return
        settings, number = self.settings, len(self._stores)
        if not number:
            self._remove_leftovers()
        store = DiskStore(
            settings.folder, settings.rank, {str(index): nbytes for index, nbytes in enumerate(sizes)},
            settings.in_flight, settings.io_bytes, name=f"{settings.name}-{number}" if number else settings.name,
        )  # fmt: skip
        self._stores.append(store)
        for index, nbytes in enumerate(sizes):
            self._free.setdefault(nbytes, []).append((store, str(index)))

    def take(self, what: str, planes: tuple[Plane, ...], elements: int, memory: Memory) -> list[Piece]:
        """Room for a chunk's state, zeros at first, and buffers that are large enough.

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
        """Forget pieces; their room is free for others, and buffers become as small as they may."""
        pieces = list(pieces)
        self.ring.forget(pieces)
        for piece in pieces:
            self._free[piece.nbytes].append((piece.store, piece.block))
            self._used[piece.nbytes] -= 1
        self.ring.fit(max((nbytes for nbytes, count in self._used.items() if count), default=0), memory)

    def close(self) -> None:
        """Remove the files, and give the buffers back."""
        self.ring.close()
        for store in self._stores:
            store.close()
        self._stores.clear()
        self._free.clear()
        self._used.clear()

    def _cuts(self, planes: tuple[Plane, ...], elements: int) -> list[tuple[int, int, int]]:
        """From and to which element each piece goes, and its bytes on disk; all alike, as far as that can be."""
        _, all_bytes = lie(planes, elements)
        count = max(1, -(-all_bytes // self.settings.piece_bytes))
        length = -(-elements // (count * BLOCK_ELEMS)) * BLOCK_ELEMS
        found = []
        for begin in range(0, elements, length):
            end = min(begin + length, elements)
            found.append((begin, end, round_up(lie(planes, end - begin)[1])))
        return found

    def _remove_leftovers(self) -> None:
        """Remove the further files of a dead process, which a new one may not come to need."""
        folder, name, rank = Path(self.settings.folder), self.settings.name, self.settings.rank
        for path in folder.glob(f"meshfold-{glob.escape(name)}-*-rank{rank:05d}.blocks"):
            number = path.name.removeprefix(f"meshfold-{name}-").split("-")[0]
            if number.isdigit():
                with suppress(DiskError):  # in use, or not ours: it will be in nobody's way
                    # An empty store takes the place of one that nobody uses, and goes.
                    DiskStore(folder, rank, {}, 1, name=f"{name}-{number}", direct=False).close()
