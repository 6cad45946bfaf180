"""Files that are there whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that nobody ever sees half of it: several processes may do so at once.

    Args:
        path: of the file; its folder is there. What it was before stays until all of the new one is written.
        write: writes it, under the name that it is given.
    """
    part = path.with_name(f".{secrets.token_hex(4)}-{path.name}")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
