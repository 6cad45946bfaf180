"""Layout of a block file, its header, and aligned memory for direct I/O. Nothing is read or written here.

    0        header page: magic, version, process, checksum (one sector)
    4096     one page to try direct I/O on
    8192     the blocks, each from a page boundary on

A store removes its file when it is closed. So a file with a header and no lock was left by a process that was
killed: it is never read, and may be replaced or removed.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshfold.zero_gemini.errors import DiskError

ALIGN = 4096
"""Bytes. Direct I/O needs offsets, lengths and addresses in multiples of the device's block: 512 or 4096."""
MAGIC = b"MFBLOCKS"
VERSION = 2
PROBE_AT, BLOCKS_AT = ALIGN, 2 * ALIGN
MAX_CHUNK_BYTES = 1 << 30  # a system call moves less than 2 GiB
_HEADER = struct.Struct("<8sIQ")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first page of a file: which process made it."""

    pid: int

    def pack(self) -> bytes:
        """Return the page as bytes, with a checksum."""
        fixed = _HEADER.pack(MAGIC, VERSION, self.pid)
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
            raise DiskError(f"{where} is truncated: {len(page)} bytes are left, not even its header of {ALIGN}.")
        fixed, check = page[: _HEADER.size], page[_HEADER.size : HEADER_BYTES]
        if _CHECK.pack(zlib.crc32(fixed)) != check or page[HEADER_BYTES:].strip(b"\0"):
            raise DiskError(f"{where} is damaged: the checksum of its header does not match.")
        _, version, pid = _HEADER.unpack(fixed)
        if version != VERSION:
            raise DiskError(f"{where} has format {version}, and this Meshfold reads format {VERSION}.")
        return Header(pid=pid)


@dataclass(frozen=True, kw_only=True)
class BlockPlace:
    """Location of a block: offset and length in bytes, and the length of each of its pieces but the last."""

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

    @property
    def file_bytes(self) -> int:
        return BLOCKS_AT + sum(round_up(nbytes) for nbytes in self.sizes.values())

    def places(self) -> dict[str, BlockPlace]:
        places, at = {}, BLOCKS_AT
        for name, nbytes in self.sizes.items():
            places[name] = BlockPlace(name=name, offset=at, nbytes=nbytes, chunk_bytes=self.chunk_bytes)
            at += round_up(nbytes)
        return places


Bytes = npt.NDArray[np.uint8]


def round_up(nbytes: int) -> int:
    """Return the next multiple of `ALIGN`, in bytes."""
    return -(-nbytes // ALIGN) * ALIGN


def aligned_empty(nbytes: int) -> Tensor:
    """Return an uninitialised CPU tensor ``(nbytes,)`` of uint8 that begins on a page, so that direct I/O needs no copy.

    Args:
        nbytes: length in bytes; one page more is allocated. Use ``.view(dtype)`` for another type.
    """
    if nbytes < 0:
        raise DiskError(f"aligned_empty({nbytes}): a number of bytes cannot be negative.")
    raw = torch.empty(nbytes + ALIGN, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGN
    return raw[start : start + nbytes]


def bytes_of(tensor: Tensor, what: str) -> Bytes:
    """Return the bytes of a contiguous CPU tensor, sharing its memory.

    Raises:
        DiskError: the tensor is on another device, is not contiguous, or is lazily conjugated or negated.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise DiskError(
            f"{what}: the tensor must be a dense one on the CPU, but is {tensor.layout} on {tensor.device}."
        )
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise DiskError(
            f"{what}: the tensor {tuple(tensor.shape)} is a view that is not contiguous: pass .contiguous()."
        )
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat
