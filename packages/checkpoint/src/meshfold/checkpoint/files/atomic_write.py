"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that nobody ever sees half of it, also after a power cut: several processes may do so at once.

    Args:
        path: of the file; its folder is there. What it was before stays until all of the new one is on the disk.
        write: writes it, under the name that it is given.
    """
    part = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        write(part)
        fsync_path(part)
        part.replace(path)
        fsync_path(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_text_synced(path: Path, text: str) -> None:
    """Write a text file and bring it to the disk; for a folder that nobody reads yet."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
