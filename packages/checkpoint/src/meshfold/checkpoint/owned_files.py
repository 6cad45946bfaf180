"""Which files of a folder are a checkpoint's own: a save, a prune or a clean-up removes these and nothing else.

A name counts that this package writes. Folders are never removed with what is in them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from meshfold.checkpoint.file_names import EXTRA_STATE_FILE, REPLACED_FILE, SCHEDULER_FILE, STATE_FILE

_TENSORS = r"(?:model|optimizer(?:-\d+)?)"
_NUMBER = r"(?:-\d{5,}-of-\d{5,})?"
_SMALL = "|".join(re.escape(name) for name in (SCHEDULER_FILE, EXTRA_STATE_FILE, "lightning.pt"))
_LISTED = re.compile(
    rf"{_TENSORS}(?:-blocks)?{_NUMBER}\.safetensors|{_TENSORS}\.safetensors\.index\.json|{_TENSORS}\.blocks\.json|{_SMALL}"
)
_UNDER_WAY = re.compile(
    rf"(?:{_LISTED.pattern})(?:\.part|\.failed)?|{re.escape(STATE_FILE)}|{re.escape(REPLACED_FILE)}"
)


def may_be_listed(name: str) -> bool:
    """Return whether a checkpoint's index may list such a file."""
    return _LISTED.fullmatch(name) is not None


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files that an index lists. Folders and names that no checkpoint has stay."""
    for name in names:
        path = folder / name
        if may_be_listed(name) and _is_file(path):
            path.unlink()


def remove_unfinished(folder: Path) -> None:
    """Remove a folder that a save has begun, with the files that a save writes. With others in it, it stays with these."""
    if not _is_folder(folder):
        return
    for path in sorted(folder.iterdir()):
        if _UNDER_WAY.fullmatch(path.name) and _is_file(path):
            path.unlink()
    with suppress(OSError):  # something of somebody's is in it
        folder.rmdir()


def _is_file(path: Path) -> bool:
    """Whether it is a file or a link: what is unlinked without a loss elsewhere."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not os.path.islink(path)
