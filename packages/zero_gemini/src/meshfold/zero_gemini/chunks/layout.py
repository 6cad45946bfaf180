"""Positions of parameters in chunks: arithmetic on element counts; no tensor is touched.

A *chunk* is a flat run of elements of one group. With N shards, rank r keeps elements ``[r·S, (r+1)·S)`` of it, ``S = size / N``,
and an all-gather of the shards is the chunk. Parameters are in it in their order of use, so parameters that are needed together are
gathered together::

    layout = lay_out([Item("wte", 4096, "bf16"), Item("fc", 1000, "bf16")], chunk_elems=8192, shards=2)
    print(layout)
    layout.shard_slices(layout.chunk_of("fc"), rank=1)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from meshfold.mesh import did_you_mean
from meshfold.mesh.spec import format_table
from meshfold.zero_gemini.errors import ChunkLayoutError

# Shards are aligned to blocks of 8-bit moments (256 elements share a scale). That is at least 256 bytes in every dtype, so
# also whole cache lines and vectors.
SHARD_ALIGN_ELEMS = 256

# Parameters are aligned to at least 64 bytes in every dtype (a cache line, an AVX-512 vector), and 128 bytes in 16 bits
# (a GPU memory transaction); matmuls and Triton need 16. Matrices are multiples of it anyway, so only small or odd
# parameters waste anything, at most 63 elements each.
SLOT_ALIGN_ELEMS = 64


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter to be laid out.

    Attributes:
        name: unique in a layout.
        numel: elements.
        group: what its chunk-mates must share (axes to reduce over, dtype, trainable or frozen, ...): any hashable.
    """

    name: str
    numel: int
    group: Hashable


@dataclass(frozen=True, slots=True)
class Slot:
    """The elements ``[start_elems, start_elems + numel)`` of a chunk: the position of one parameter."""

    name: str
    start_elems: int
    numel: int


class ShardSlice(NamedTuple):
    """A run of a flat parameter in one rank's shard of a chunk, all in elements."""

    name: str
    parameter_start: int
    shard_start: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """Contents of one chunk.

    Attributes:
        index: its position in the layout.
        group: the group of all its parameters.
        size_elems: elements, padding included; ``shards × shard_elems``.
        shard_elems: elements that each rank keeps.
        slots: its parameters, in order and without overlap.
        names: of its parameters.
    """

    index: int
    group: Hashable
    size_elems: int
    shard_elems: int
    slots: tuple[Slot, ...]
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)  # made once: read for every gradient

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(slot.name for slot in self.slots))

    @property
    def used_elems(self) -> int:
        """Elements that belong to a parameter."""
        return sum(slot.numel for slot in self.slots)

    @property
    def waste_elems(self) -> int:
        """Elements of padding: gaps before aligned slots, and the tail."""
        return self.size_elems - self.used_elems

    def lengths(self, name: str) -> list[int]:
        """Return the number of elements of a parameter on each rank that has a shard."""
        slot = next(slot for slot in self.slots if slot.name == name)
        begin, end = slot.start_elems, slot.start_elems + slot.numel
        starts = range(0, self.size_elems, self.shard_elems)
        return [max(0, min(end, start + self.shard_elems) - max(begin, start)) for start in starts]


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """All chunks, in the order of their first use.

    Attributes:
        chunks: the chunks; ``chunks[i].index == i``.
        chunk_elems: size of a full chunk: the requested one, rounded up; a chunk of a single larger parameter exceeds it, and those
            of groups that were given a size of their own.
        shards: ranks that share each chunk.
        align_elems: every shard's size is a multiple of this.
    """

    chunks: tuple[ChunkSpec, ...]
    chunk_elems: int
    shards: int
    align_elems: int
    _places: dict[str, tuple[ChunkSpec, Slot]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {slot.name: (chunk, slot) for chunk in self.chunks for slot in chunk.slots}
        object.__setattr__(self, "_places", places)

    @property
    def size_elems(self) -> int:
        """Elements of all chunks."""
        return sum(chunk.size_elems for chunk in self.chunks)

    @property
    def used_elems(self) -> int:
        """Elements of all parameters."""
        return sum(chunk.used_elems for chunk in self.chunks)

    @property
    def waste_elems(self) -> int:
        """Elements of padding."""
        return self.size_elems - self.used_elems

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, chunk by chunk."""
        return tuple(self._places)

    def chunk_of(self, name: str) -> ChunkSpec:
        """Return the chunk of a parameter.

        Raises:
            ChunkLayoutError: if the layout has no such parameter.
        """
        return self._place(name)[0]

    def slot_of(self, name: str) -> Slot:
        """Return the place of a parameter in its chunk.

        Raises:
            ChunkLayoutError: if the layout has no such parameter.
        """
        return self._place(name)[1]

    def shard_slices(self, chunk: ChunkSpec | int, rank: int) -> list[ShardSlice]:
        """Return the contents of the shard of ``rank``, in order: ``(name, start in the parameter, start in the shard, length)``.

        A parameter may span shards: over all ranks its slices cover it, each element once.

        Raises:
            ChunkLayoutError: for a chunk or rank that does not exist.
        """
        if isinstance(chunk, int):
            if not 0 <= chunk < len(self.chunks):
                raise ChunkLayoutError(f"there is no chunk {chunk}: this layout has {len(self.chunks)}, from 0 on")
            chunk = self.chunks[chunk]
        if not 0 <= rank < self.shards:
            raise ChunkLayoutError(f"there is no rank {rank}: chunks have {self.shards} shards, from 0 on")
        first = rank * chunk.shard_elems
        last = first + chunk.shard_elems
        slices = []
        for slot in chunk.slots:
            start = max(first, slot.start_elems)
            stop = min(last, slot.start_elems + slot.numel)
            if start < stop:
                slices.append(ShardSlice(slot.name, start - slot.start_elems, start - first, stop - start))
        return slices

    def _place(self, name: str) -> tuple[ChunkSpec, Slot]:
        try:
            return self._places[name]
        except KeyError:
            hint = did_you_mean(name, self._places)
            raise ChunkLayoutError(f"no parameter {name!r} in these {len(self.chunks)} chunks.{hint}") from None

    def __str__(self) -> str:
        """Return a table, one line a chunk."""
        rows = [("chunk", "group", "parameters", "from", "to", "size", "shard", "waste")]
        rows += [
            (
                str(chunk.index),
                str(chunk.group),
                str(len(chunk.slots)),
                chunk.slots[0].name,
                chunk.slots[-1].name,
                f"{chunk.size_elems:,}",
                f"{chunk.shard_elems:,}",
                f"{chunk.waste_elems:,}",
            )
            for chunk in self.chunks
        ]
        lines = format_table(rows, "><><<>>>")
        share = self.waste_elems / self.size_elems if self.size_elems else 0.0
        lines.append(
            f"{len(self._places)} parameters, {self.used_elems:,} elements in {len(self.chunks)} chunks of up to "
            f"{self.chunk_elems:,}, {self.shards} shards each; waste {self.waste_elems:,} elements ({share:.2%})"
        )
        return "\n".join(lines)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``number``."""
    return -(-number // multiple) * multiple


def check_units(shards: int, align_elems: int, slot_align_elems: int) -> None:
    """Check sizes and alignments.

    Raises:
        ChunkLayoutError: if one of them is not positive, or slots are aligned more strictly than shards.
    """
    for what, value in (
        ("shards", shards),
        ("align_elems", align_elems),
        ("slot_align_elems", slot_align_elems),
    ):
        if value <= 0:
            raise ChunkLayoutError(f"{what} is {value}: it must be at least 1")
    if align_elems % slot_align_elems:
        raise ChunkLayoutError(
            f"align_elems is {align_elems}, not a multiple of slot_align_elems, {slot_align_elems}: "
            f"take {round_up(align_elems, slot_align_elems)}, or smaller slots"
        )


def check_items(items: Iterable[Item]) -> None:
    """Check that every parameter has elements and is given once.

    Raises:
        ChunkLayoutError: for a parameter without elements, or one that is given twice.
    """
    seen: set[str] = set()
    for item in items:
        if item.numel <= 0:
            raise ChunkLayoutError(f"parameter {item.name!r} has {item.numel} elements: leave it out of the chunks")
        if item.name in seen:
            raise ChunkLayoutError(f"parameter {item.name!r} is given twice: give tied parameters once, under one name")
        seen.add(item.name)


def lay_out(
    items: Iterable[Item],
    chunk_elems: int,
    shards: int,
    *,
    larger: Mapping[Hashable, int] = MappingProxyType({}),
    align_elems: int = SHARD_ALIGN_ELEMS,
    slot_align_elems: int = SLOT_ALIGN_ELEMS,
) -> ChunkLayout:
    """Put parameters into chunks.

    Items come in their order of use and go into their group's open chunk; one that does not fit closes it and opens the next. One
    that exceeds a whole chunk gets a chunk of its own, and the open chunk stays open. Full chunks all have the same size, so
    gathered buffers can be reused. The last chunk of each group, chunks of a single large item, and those of groups in ``larger``
    are only as large as needed.

    Args:
        items: parameters in their order of use, tied ones once.
        chunk_elems: elements of a full chunk; rounded up to a multiple of ``shards × align_elems``.
        shards: ranks that share each chunk.
        larger: most elements of a chunk of some groups, in place of ``chunk_elems``.
        align_elems: each shard's size is a multiple of this many elements.
        slot_align_elems: each parameter starts at a multiple of this many elements of its chunk.

    Raises:
        ChunkLayoutError: for sizes that are not positive, or an item that is given twice.
    """
    items = list(items)
    check_units(shards, align_elems, slot_align_elems)
    check_items(items)
    for elems in (chunk_elems, *larger.values()):
        if elems <= 0:
            raise ChunkLayoutError(f"chunk_elems is {elems}: a chunk must have at least 1 element")
    unit = shards * align_elems
    usual = round_up(chunk_elems, unit)

    opened: list[_Open] = []
    current: dict[Hashable, _Open] = {}
    for item in items:
        # `full` is a multiple of the slot alignment, so a padded item fits if and only if the item does
        padded = round_up(item.numel, slot_align_elems)
        full = round_up(larger[item.group], unit) if item.group in larger else usual
        if padded > full:
            chunk = _Open(item.group, size_elems=round_up(item.numel, unit))
            opened.append(chunk)
        else:
            open_chunk = current.get(item.group)
            if open_chunk is None or open_chunk.end_elems + padded > full:
                if open_chunk is not None:
                    open_chunk.size_elems = round_up(open_chunk.end_elems, unit) if item.group in larger else full
                open_chunk = current[item.group] = _Open(item.group)
                opened.append(open_chunk)
            chunk = open_chunk
        chunk.slots.append(Slot(item.name, chunk.end_elems, item.numel))
        chunk.end_elems += padded
    for chunk in current.values():
        chunk.size_elems = round_up(chunk.end_elems, unit)
    chunks = tuple(
        ChunkSpec(index, chunk.group, chunk.size_elems, chunk.size_elems // shards, tuple(chunk.slots))
        for index, chunk in enumerate(opened)
    )
    return ChunkLayout(chunks, usual, shards, align_elems)


@dataclass(slots=True)
class _Open:
    """Chunk that is being filled."""

    group: Hashable
    size_elems: int = 0
    end_elems: int = 0
    slots: list[Slot] = field(default_factory=list)
