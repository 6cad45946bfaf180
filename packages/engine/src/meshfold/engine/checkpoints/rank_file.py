"""A file that one rank writes of a checkpoint: which rectangles of which tensors, their copies on the host, and the writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshfold.engine.checkpoints.block_files import file_of, key_of
from meshfold.engine.checkpoints.copying import Pair
from meshfold.engine.checkpoints.rectangles import Piece
from meshfold.engine.checkpoints.tensor_file import Described, TensorWriter
from meshfold.engine.states import Source
from meshfold.engine.world import World
from meshfold.mesh.parts import Parts


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A rectangle on its way to a file.

    Attributes:
        tensor: of which it is a piece.
        key: its name in the file.
        described: what it is.
        piece: which one.
    """

    tensor: str
    key: str
    described: Described
    piece: Piece


class RankFile:
    """A file of this rank: what goes into it, and its writer."""

    def __init__(self, folder: Path, name: str, sources: dict[str, Source], world: World) -> None:
        """Take note of the tensors as they are, and see that the file can be written."""
        rank, size = world.mesh.rank, world.mesh.world_size
        self.path = folder / file_of(name, rank, size)
        self.part = self.path.with_name(f"{self.path.name}.part")
        self._sources = sources
        with torch.no_grad():
            self._kept = {tensor: _noted(source) for tensor, source in sources.items() if not source.on_disk}
        self._copies: dict[str, tuple[Tensor, ...]] = {}
        self._made: tuple[str, Tensor] | None = None
        self._writer: TensorWriter | None = None
        self.rectangles: list[_Written] = []
        self.part.touch()

    @property
    def has_some_on_disk(self) -> bool:
        """Whether some of its tensors live on a disk."""
        return any(source.on_disk for source in self._sources.values())

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(one.described.bytes for one in self.rectangles)

    def lay_out(self) -> None:
        """Find out which rectangles this rank writes, and begin the file, with what is on a disk."""
        if self._writer is not None:
            return
        for tensor, source in self._sources.items():
            for piece in source.pieces(tensor):
                described = Described(dtype=source.dtype, shape=piece.sizes)
                key = key_of(tensor, piece.offsets, piece.sizes)
                self.rectangles.append(_Written(tensor=tensor, key=key, described=described, piece=piece))
        # What is on a disk is written first. Wide dtypes first, so that each begins at a multiple of its elements.
        self.rectangles.sort(
            key=lambda one: (not self._sources[one.tensor].on_disk, -one.described.dtype.itemsize)
        )
        announced = {one.key: one.described for one in self.rectangles}
        self._writer = TensorWriter(self.part, announced, order=[*announced])
        for one in self.rectangles:
            source = self._sources[one.tensor]
            if source.on_disk:
                if self._made is None or self._made[0] != one.tensor:
                    self._made = one.tensor, source.parts().made()
                self._writer.write(one.key, one.piece.view(self._made[1]))
        self._made = None

    def copies(self, buffer: Callable[[str, Tensor], Tensor]) -> Iterator[Pair]:
        """What is copied to the host, and where to.

        Args:
            buffer: memory of the host for the copy of a tensor, by a name of its own.
        """
        for one in self.rectangles:
            parts = self._kept.get(one.tensor)
            if parts is None:
                continue
            name, found = one.tensor, parts.tensors
            if parts.is_plain:  # else a view of what is made of them is no view of each
                name, found = one.key, (one.piece.view(parts.tensors[0]),)
            if name not in self._copies:
                there = [f"{self.path.name}/{name}/{number}" for number in range(len(found))]
                self._copies[name] = tuple(buffer(*of) for of in zip(there, found, strict=True))
                yield from zip(self._copies[name], found, strict=True)

    def let_go(self) -> None:
        """All is copied: the tensors may go."""
        self._kept = {tensor: Parts((), parts.whole) for tensor, parts in self._kept.items()}

    def write(self) -> None:
        """Write the copies, and give the file its name."""
        assert self._writer is not None  # it was laid out
        for one in self.rectangles:
            parts = self._kept.get(one.tensor)
            if parts is None:
                continue
            if parts.is_plain:
                self._writer.write(one.key, parts.whole(self._copies[one.key]))
                continue
            if self._made is None or self._made[0] != one.tensor:
                self._made = one.tensor, parts.whole(self._copies[one.tensor])
            self._writer.write(one.key, one.piece.view(self._made[1]))
        self.rename()

    def rename(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self.part.rename(self.path)

    def abandon(self) -> None:
        """Close it as it is."""
        if self._writer is not None:
            self._writer.abandon()

    def give_up(self, error: Exception) -> None:
        """Let rank 0 know, in the place of what was written: that room is there."""
        self.abandon()
        with suppress(OSError):
            self.part.write_text(str(error))
        with suppress(OSError):
            self.part.rename(self.path.with_name(f"{self.path.name}.failed"))


def _noted(source: Source) -> Parts:
    """What this rank keeps of a tensor; a copy on its device if a forward may change it."""
    parts = source.parts()
    return parts if source.alike else Parts(tuple(part.clone() for part in parts.tensors), parts.whole)
