"""Removing a checkpoint: the files that its index lists, and its folder if nothing else is in it.

The index is renamed first, so that at no moment a checkpoint looks whole and is not; a process that dies leaves the list of what
has yet to go.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from meshfold.checkpoint.file_names import STATE_FILE, STATE_FILE_REMOVED, lock_path, remove_files
from meshfold.checkpoint.files.atomic_write import fsync_path
from meshfold.checkpoint.folder import replacement
from meshfold.checkpoint.folder.lock import hold_lock
from meshfold.checkpoint.state.state_file import listed_files


def remove_listed(folder: Path) -> None:
    """Remove a checkpoint; what no index lists stays, with the folder.

    Raises:
        InUseError: if another process writes there.
        OSError: if a file cannot be removed.
    """
    with hold_lock(lock_path(folder, inside=True), doing="removing it"):
        replacement.finish_replacement(folder)
        if listed_files(folder / STATE_FILE) is not None:
            (folder / STATE_FILE).replace(folder / STATE_FILE_REMOVED)
            fsync_path(folder)
        finish_removal(folder)
    with suppress(OSError):  # something else is in it
        folder.rmdir()


def discard_set_aside(folder: Path) -> None:
    """Remove a checkpoint that an earlier version has set aside, if any."""
    if folder.is_dir() and not folder.is_symlink():
        remove_listed(folder)


def finish_removal(folder: Path) -> None:
    """Remove the files of a checkpoint whose index was renamed. The folder's lock is held."""
    aside = folder / STATE_FILE_REMOVED
    listed = listed_files(aside)
    if listed is not None and not (folder / STATE_FILE).exists():
        remove_files(folder, listed)
        aside.unlink()


def is_being_removed(folder: Path) -> bool:
    """Return whether a process has begun to remove a checkpoint, and has not ended or has died at it."""
    return (folder / STATE_FILE_REMOVED).exists() and not (folder / STATE_FILE).exists()
