"""What lies where in a block file, and the header that tells a good file from any other. Pure: nothing here does I/O.

    0        header page: magic, version, state, rank, process, lengths, checksums (one sector)
    4096     layout: names and sizes of the blocks, as JSON
    ...      record: per block how often it was written, per piece its checksum; valid in a closed file only
    ...      one page to try direct I/O on
    ...      the blocks, each from a page boundary on

The header says ``live`` from before the first block is written until the store is closed, and ``closed`` is written
only after blocks and record have been synced. So a process that dies at any moment leaves a ``live`` file, which is
never read: a half-written block cannot be taken for a whole one, whatever the order its bytes reached the disk in.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import DiskError
from .memory import ALIGN, round_up

MAGIC = b"MFBLOCKS"
VERSION = 1
LIVE, CLOSED = 1, 2
MAX_CHUNK_BYTES = 1 << 30  # one system call moves less than 2 GiB
_HEADER = struct.Struct("<8s4I4Q2I")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first page of a file; sizes in bytes."""

    state: int
    rank: int
    verify: bool
    pid: int
    layout_bytes: int
    record_bytes: int
    file_bytes: int
    layout_crc: int
    record_crc: int = 0
    version: int = VERSION

    def pack(self) -> bytes:
        fixed = _HEADER.pack(
            *(MAGIC, self.version, self.state, self.rank, int(self.verify)),
            *(
                self.pid,
                self.layout_bytes,
                self.record_bytes,
                self.file_bytes,
                self.layout_crc,
                self.record_crc,
            ),
        )
        return (fixed + _CHECK.pack(zlib.crc32(fixed))).ljust(ALIGN, b"\0")

    @staticmethod
    def unpack(page: bytes, where: str) -> Header:
        """Read a first page.

        Raises:
            DiskError: foreign, cut short, damaged, or of another version of the format.
        """
        if page[: len(MAGIC)] != MAGIC[: len(page)] or not page:
            raise DiskError(f"{where} is not a Meshfold block file (it begins with {page[:8]!r}).")
        if len(page) < ALIGN:
            raise DiskError(
                f"{where} is truncated: {len(page)} bytes are left, not even its header of {ALIGN}."
            )
        fixed, check = page[: _HEADER.size], page[_HEADER.size : HEADER_BYTES]
        if _CHECK.pack(zlib.crc32(fixed)) != check or page[HEADER_BYTES:].strip(b"\0"):
            raise DiskError(f"{where} is damaged: the checksum of its header does not fit.")
        _, version, state, rank, verify, pid, *sizes, layout_crc, record_crc = _HEADER.unpack(fixed)
        if version != VERSION:
            raise DiskError(f"{where} has format {version}, and this Meshfold reads format {VERSION}.")
        layout_bytes, record_bytes, file_bytes = sizes
        return Header(
            state=state, rank=rank, verify=bool(verify), pid=pid, layout_bytes=layout_bytes,
            record_bytes=record_bytes, file_bytes=file_bytes, layout_crc=layout_crc, record_crc=record_crc,
        )  # fmt: skip

    def closed(self, record: bytes) -> Header:
        return replace(self, state=CLOSED, record_crc=zlib.crc32(record))


@dataclass(frozen=True, kw_only=True)
class BlockPlace:
    """Where a block lies: offset and length in bytes, and the length of each of its pieces but the last."""

    name: str
    offset: int
    nbytes: int
    chunk_bytes: int

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """``(start, length)`` in bytes within the block."""
        steps = range(0, self.nbytes, self.chunk_bytes)
        return [(start, min(self.chunk_bytes, self.nbytes - start)) for start in steps]


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """All places of a file."""

    sizes: dict[str, int]
    chunk_bytes: int

    def __post_init__(self) -> None:
        chunk = self.chunk_bytes
        if not 0 < chunk <= MAX_CHUNK_BYTES or chunk % ALIGN:
            raise DiskError(f"chunk_bytes={chunk} must be a multiple of {ALIGN}, at most {MAX_CHUNK_BYTES}.")
        for name, nbytes in self.sizes.items():
            if nbytes < 0:
                raise DiskError(f"Block {name!r} cannot have {nbytes} bytes.")

    def encoded(self) -> bytes:
        return json.dumps({"chunk_bytes": self.chunk_bytes, "blocks": list(self.sizes.items())}).encode()

    @staticmethod
    def decode(text: bytes) -> FileLayout:
        fields = json.loads(text)
        return FileLayout(sizes=dict(fields["blocks"]), chunk_bytes=fields["chunk_bytes"])

    @property
    def record_at(self) -> int:
        return ALIGN + round_up(len(self.encoded()))

    @property
    def record_bytes(self) -> int:
        pieces = sum(-(-nbytes // self.chunk_bytes) for nbytes in self.sizes.values())
        return 8 * len(self.sizes) + 4 * pieces

    @property
    def probe_at(self) -> int:
        return self.record_at + round_up(self.record_bytes)

    @property
    def file_bytes(self) -> int:
        return self.probe_at + ALIGN + sum(round_up(nbytes) for nbytes in self.sizes.values())

    def places(self) -> dict[str, BlockPlace]:
        places, at = {}, self.probe_at + ALIGN
        for name, nbytes in self.sizes.items():
            places[name] = BlockPlace(name=name, offset=at, nbytes=nbytes, chunk_bytes=self.chunk_bytes)
            at += round_up(nbytes)
        return places

    def header(self, *, rank: int, verify: bool, pid: int) -> Header:
        text = self.encoded()
        return Header(
            state=LIVE, rank=rank, verify=verify, pid=pid, layout_bytes=len(text), record_bytes=self.record_bytes,
            file_bytes=self.file_bytes, layout_crc=zlib.crc32(text),
        )  # fmt: skip


def pack_record(generations: list[int], checksums: list[int]) -> bytes:
    """How often each block was written (0: never, or not whole) and the checksum of each piece."""
    return struct.pack(f"<{len(generations)}Q{len(checksums)}I", *generations, *checksums)


def unpack_record(record: bytes, blocks: int) -> tuple[list[int], list[int]]:
    numbers = struct.unpack(f"<{blocks}Q{(len(record) - 8 * blocks) // 4}I", record)
    return list(numbers[:blocks]), list(numbers[blocks:])


def footprint_bytes(blocks: Mapping[str, int], chunk_bytes: int = 16 << 20) -> int:
    """Bytes that a `DiskStore` of these blocks (name: bytes) preallocates: the blocks, padding and header."""
    return FileLayout(sizes=dict(blocks), chunk_bytes=chunk_bytes).file_bytes
