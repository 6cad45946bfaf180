"""Whether a file on disk is a good one: by itself, and for what is asked of it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import DiskError
from .folder import block_path, lock, unlock
from .layout import CLOSED, FileLayout, Header, unpack_record
from .memory import ALIGN


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """A file that `check` found good. `blocks`: bytes of each; `written`: how often each was written whole."""

    path: Path
    rank: int
    blocks: dict[str, int]
    written: dict[str, int]
    file_bytes: int
    verify: bool


def check(folder: str | os.PathLike[str], rank: int = 0, *, name: str = "optimizer") -> StoreInfo:
    """What is in a file that `DiskStore.open_existing` would take; changes nothing.

    Raises:
        DiskError: as `DiskStore.open_existing`.
    """
    path = block_path(folder, name, rank)
    control = lock(path, create=False)
    try:
        header, layout, record = expect(path, control, rank=rank, blocks=None)
    finally:
        unlock(control)
    generations, _ = unpack_record(record, len(layout.sizes))
    return StoreInfo(
        path=path, rank=rank, blocks=layout.sizes, written=dict(zip(layout.sizes, generations, strict=True)),
        file_bytes=header.file_bytes, verify=header.verify,
    )  # fmt: skip


def expect(
    path: Path, control: int, *, rank: int, blocks: Mapping[str, int] | None
) -> tuple[Header, FileLayout, bytes]:
    """Header, layout and record of a closed file of this rank with these blocks (None: any).

    Raises:
        DiskError: foreign, truncated, damaged, never closed, of another rank or of other blocks.
    """
    header = Header.unpack(os.pread(control, ALIGN, 0), str(path))
    if header.state != CLOSED:
        raise DiskError(
            f"{path} was left behind by process {header.pid}, which never closed it: blocks may be half-written. "
            "Resume from a checkpoint; the file may be deleted."
        )
    size = os.fstat(control).st_size
    if size != header.file_bytes:
        word = "truncated" if size < header.file_bytes else "longer than it was written"
        raise DiskError(f"{path} is {word}: it has {size} bytes, and its header says {header.file_bytes}.")
    text = os.pread(control, header.layout_bytes, ALIGN)
    if zlib.crc32(text) != header.layout_crc:
        raise DiskError(f"{path} is damaged: the checksum of its list of blocks does not fit.")
    layout = FileLayout.decode(text)
    record = os.pread(control, header.record_bytes, layout.record_at)
    if zlib.crc32(record) != header.record_crc:
        raise DiskError(f"{path} is damaged: the checksum of its record does not fit.")
    if header.rank != rank:
        raise DiskError(f"{path} was written by rank {header.rank}, not {rank}.")
    if blocks is not None and dict(blocks) != layout.sizes:
        wrong = [
            f"{name!r}" for name in {**layout.sizes, **blocks} if layout.sizes.get(name) != blocks.get(name)
        ]
        raise DiskError(
            f"{path} holds other blocks: {len(wrong)} differ in name or size, the first is {wrong[0]}."
        )
    return header, layout, record
