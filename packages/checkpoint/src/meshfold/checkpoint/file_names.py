"""Names of the files and folders of a checkpoint, and removal of only those files.

::

    ckpt/                       a checkpoint
      state.json                its index: what it is a checkpoint of, and its other files
      model.safetensors ...
      .saving/                  the next one, while it is written
      .saved-1f0c.../           the next one, complete: its files are moved to their places one by one
      .lock                     held by the process that writes
    .new.writing/               a first checkpoint "new", while it is written
    .new.lock                   held by the process that writes it
    .new.old/                   one that an earlier version was replacing when it died

Only files with these names are ever removed. Folders are only removed when empty.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

STATE_FILE, SCHEDULER_FILE, EXTRA_STATE_FILE = "state.json", "scheduler.pt", "extra_state.pt"
STATE_FILE_REMOVED = "state.json.removing"
"""The index of a checkpoint that is being removed: its files go first."""

REPLACED_FILE = "replaced.json"
"""The index before, within ``.saved-...``: its files go when the new ones come."""

SAVING_FOLDER, SAVED_FOLDER_PREFIX, LOCK_FILE = ".saving", ".saved-", ".lock"


def set_aside_path(target: Path) -> Path:
    """Return the path where an earlier version moved a checkpoint while the next one replaced it."""
    return target.with_name(f".{target.name}.old")


def writing_path(target: Path, *, inside: bool) -> Path:
    """Return the path that a checkpoint is written to first: within its folder if that exists, else next to it."""
    return target / SAVING_FOLDER if inside else target.with_name(f".{target.name}.writing")


def lock_path(target: Path, *, inside: bool) -> Path:
    """Return the path of the writer's lock."""
    return target / LOCK_FILE if inside else target.with_name(f".{target.name}.lock")


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
    """Return True if a checkpoint's index may list such a file."""
    return _LISTED.fullmatch(name) is not None


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files that an index lists, except folders and names that no checkpoint has."""
    for name in names:
        path = folder / name
        if may_be_listed(name) and _is_file(path):
            path.unlink()


def remove_unfinished(folder: Path) -> None:
    """Remove a folder that a save has started, with the files that a save writes. It stays if it has others."""
    if not _is_folder(folder):
        return
    for path in sorted(folder.iterdir()):
        if _UNDER_WAY.fullmatch(path.name) and _is_file(path):
            path.unlink()
    with suppress(OSError):  # not empty: someone else's file is in it
        folder.rmdir()


def _is_file(path: Path) -> bool:
    """Return True for a file or a link; unlinking a link loses nothing elsewhere."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not os.path.islink(path)
