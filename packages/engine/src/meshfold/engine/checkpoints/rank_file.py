"""One rank's file of a checkpoint: the plan (which rectangles of which tensors), copies on the host, and writing.

Names are looked up by the descriptor of the folder that existed at the start. Otherwise a rank that outlives its run would
write into the folder of a newer run with the same name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshfold.checkpoint.shards import Shard, ShardRule
from meshfold.checkpoint.staging import CopyPair, with_pauses
from meshfold.checkpoint.tensors import (
    SafetensorsHeader,
    TensorInfo,
    TensorWriter,
    shard_file_name,
    shard_key,
)
from meshfold.engine.states.protocols import Source, Sources
from meshfold.engine.world import World
from meshfold.mesh.parameters import StoredValue


class RankFile:
    """A file of this rank: its contents and its writer.

    Attributes:
        path: its final name.
        part: its name until it is written.
    """

    def __init__(self, folder: Path, name: str, sources: Sources, world: World) -> None:
        """Record the tensors' present values, and check that the file can be written.

        Args:
            folder: where the file is made.
            name: of the checkpoint's file that this is a rank's part of.
            sources: the tensors, or a function that ``lay_out`` calls for them.
            world: where they lie.
        """
        rank, size = world.mesh.rank, world.mesh.world_size
        self.path = folder / shard_file_name(name, rank, size)
        self.part = self.path.with_name(f"{self.path.name}.part")
        self._sources: Mapping[str, Source] = {}
        self._kept: dict[str, StoredValue] = {}
        self._make = None if isinstance(sources, Mapping) else sources
        if isinstance(sources, Mapping):
            self._sources = sources
            with torch.no_grad():
                self._kept = {tensor: _noted(source) for tensor, source in sources.items() if not source.on_disk}
        self._copies: dict[str, tuple[Tensor, ...]] = {}
        self._made: tuple[str, Tensor] | None = None
        self._writer: TensorWriter | None = None
        self._plan: FilePlan | None = None
        self._folder: int | None = os.open(folder, os.O_RDONLY)
        try:
            os.close(self._open(os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError as error:
            self.abandon()
            raise OSError(error.errno, error.strerror, str(self.part)) from error

    @property
    def has_some_on_disk(self) -> bool:
        """Return True if some of its tensors are on a disk."""
        return any(source.on_disk for source in self._sources.values())

    @property
    def bytes(self) -> int:
        """Bytes of its tensors; 0 before they are laid out."""
        return 0 if self._plan is None else self._plan.bytes

    @property
    def described(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint's file; none before they are laid out."""
        return {} if self._plan is None else self._plan.described

    def lay_out(self, before: FilePlan | None) -> FilePlan:
        """Find out which rectangles this rank writes, and start the file with those on a disk.

        Args:
            before: plan of the last save.
        """
        if self._plan is not None:
            return self._plan
        sources = self._sources.items() if self._make is None else self._noting(self._make())
        self._plan = plan_of(sources, before)
        self._make = None  # it holds references to the tensors
        self._writer = TensorWriter(
            self.part, self._plan.header, opener=lambda _, flags: self._open(flags & ~os.O_CREAT)
        )
        for one in self._plan.rectangles:
            if not one.on_disk:
                break
            if self._made is None or self._made[0] != one.tensor:
                self._made = one.tensor, self._sources[one.tensor].parts().made()
            self._writer.write(one.key, one.piece.view(self._made[1]))
        self._made = None
        return self._plan

    @property
    def _to_copy(self) -> Iterator[tuple[Written, StoredValue]]:
        """Yield the tensors that are not on disk, with this rank's parts."""
        assert self._plan is not None  # it was laid out
        for one in with_pauses(self._plan.rectangles):
            if not one.on_disk:
                yield one, self._kept[one.tensor]

    def copies(self, buffer: Callable[[str, Tensor], Tensor]) -> Iterator[CopyPair]:
        """Yield pairs of a tensor to copy to the host and its destination.

        Args:
            buffer: returns host memory for the copy of a tensor, by a unique name.
        """
        for one, parts in self._to_copy:
            name, found = one.tensor, parts.tensors
            if parts.is_plain:  # otherwise its pieces are views of the parts
                name, found = one.key, (one.piece.view(parts.tensors[0]),)
            if name not in self._copies:
                there = [f"{self.path.name}/{name}/{number}" for number in range(len(found))]
                self._copies[name] = tuple(buffer(*of) for of in zip(there, found, strict=True))
                yield from zip(self._copies[name], found, strict=True)

    def drop_sources(self) -> None:
        """Drop the references to the tensors: all of them are copied."""
        self._kept = {tensor: StoredValue((), parts.whole) for tensor, parts in self._kept.items()}
        self._sources = {}

    def write(self) -> None:
        """Write the copies, and give the file its name."""
        assert self._writer is not None  # it was laid out
        for one, parts in self._to_copy:
            if parts.is_plain:
                self._writer.add(one.key, parts.whole(self._copies[one.key]))
                continue
            if self._made is None or self._made[0] != one.tensor:
                self._made = one.tensor, parts.whole(self._copies[one.tensor])
            self._writer.add(one.key, one.piece.view(self._made[1]))
        self.rename()

    def rename(self) -> None:
        """Close the file and give it its final name."""
        assert self._writer is not None
        self._writer.close()
        self._rename(self.path.name)
        self.abandon()

    def abandon(self) -> None:
        """Close the unfinished file."""
        if self._writer is not None:
            self._writer.abandon()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def give_up(self, error: Exception) -> None:
        """Report an error to rank 0 in the rank's own file, truncated first so that there is room."""
        if self._folder is None:  # already renamed
            return
        if self._writer is not None:
            self._writer.abandon()
        with suppress(OSError), open(self._open(os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(str(error))
        with suppress(OSError):
            self._rename(f"{self.path.name}.failed")
        self.abandon()

    def _noting(self, sources: Iterable[tuple[str, Source]]) -> Iterator[tuple[str, Source]]:
        """Record the parts of sources while passing them on. Sources are not kept: many live objects trigger the collector."""
        for tensor, source in sources:
            self._kept[tensor] = source.parts()
            yield tensor, source

    def _open(self, flags: int) -> int:
        assert self._folder is not None  # open until the file is finished
        return os.open(self.part.name, flags, 0o666, dir_fd=self._folder)

    def _rename(self, name: str) -> None:
        os.rename(self.part.name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)


def _noted(source: Source) -> StoredValue:
    """Return this rank's part of a tensor, copied on its device if a forward may change it."""
    parts = source.parts()
    return parts if source.alike else StoredValue(tuple(part.clone() for part in parts.tensors), parts.whole)


Tensors = list[tuple[str, torch.dtype, tuple[int, ...], bool, ShardRule]]
"""All that a plan hangs on: each tensor's name, dtype and whole shape, whether it is on a disk, and its cut."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A rectangle that is being written to a file.

    Attributes:
        tensor: the tensor that it is part of.
        key: its name in the file.
        described: description of the tensor.
        piece: the rectangle.
        on_disk: whether its tensor is on a disk.
    """

    tensor: str
    key: str
    described: TensorInfo
    piece: Shard
    on_disk: bool


class FilePlan:
    """Plan of one file of this rank, made by :func:`plan_of`: its rectangles in order, and the file's header. It holds no tensor.

    It takes tens of microseconds of Python per rectangle, which would slow down training. So the next save reuses it if its
    tensors are cut the same way.

    Attributes:
        rectangles: in the order of the file.
        header: of the file.
        bytes: of all rectangles.
        described: every tensor, whole.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        # State on disk comes first, then wide dtypes before narrow ones, so that every tensor is aligned to its elements.
        self.rectangles = sorted(
            (
                Written(
                    tensor=tensor,
                    key=shard_key(tensor, piece.offsets, piece.sizes),
                    described=TensorInfo(dtype=dtype, shape=piece.sizes),
                    piece=piece,
                    on_disk=on_disk,
                )
                for tensor, dtype, _, on_disk, cut in with_pauses(tensors)
                for piece in cut.shards(tensor)
            ),
            key=lambda one: (not one.on_disk, -one.described.dtype.itemsize),
        )
        announced = {one.key: one.described for one in with_pauses(self.rectangles)}
        self.header = SafetensorsHeader(announced, order=[*announced])
        self.bytes = sum(described.bytes for described in announced.values())
        self.described = {
            tensor: TensorInfo(dtype=dtype, shape=shape) for tensor, dtype, shape, *_ in with_pauses(tensors)
        }


def plan_of(sources: Iterable[tuple[str, Source]], before: FilePlan | None) -> FilePlan:
    """Return the plan of a file of these tensors: the previous one if it is the same.

    Args:
        sources: the tensors by name, which are not kept.
        before: plan of the last save of this file.
    """
    tensors = [
        (name, source.dtype, source.shape, source.on_disk, source.cut()) for name, source in with_pauses(sources)
    ]
    return before if before is not None and before.tensors == tensors else FilePlan(tensors)
