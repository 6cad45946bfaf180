"""Replacement and removal of a checkpoint in its folder: files listed in an index are replaced or removed, everything else stays.

::

    1. .saving/            the new one is written here, with its state.json, and brought to the disk
    2. .saved-1f0c.../     its name from then on: .saved- and the checksum of its state.json
    3. state.json          replaced in one rename. From here on the checkpoint is the new one
    4. model.safetensors   and its other files: each replaces the old one in one rename; old files without a successor are removed

A file that ``state.json`` lists is looked up in ``.saved-...`` first and then in its place, so a process may die, or read, at any
time: before 3 the checkpoint is the old one, and after it the new one. The next save continues with 4, or removes what 1 and 2
left. Removal renames the index first, so an incomplete checkpoint never looks complete. If the process dies, the renamed index
lists the files that are still to be removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshfold.checkpoint.errors import CheckpointError
from meshfold.checkpoint.file_names import (
    REPLACED_FILE,
    SAVED_FOLDER_PREFIX,
    SAVING_FOLDER,
    STATE_FILE,
    STATE_FILE_REMOVED,
    lock_path,
    remove_files,
    remove_unfinished,
)
from meshfold.checkpoint.files import fsync_path, parse_json, write_text_synced
from meshfold.checkpoint.folder.lock import hold_lock
from meshfold.checkpoint.state.state_file import FILES, identity, listed_files, read_state


def is_part_of_a_save(name: str) -> bool:
    """Return True for a name of a save's own folder within a checkpoint's."""
    return name == SAVING_FOLDER or name.startswith(SAVED_FOLDER_PREFIX)


def saved_folder(folder: Path, state: Mapping[str, Any]) -> Path | None:
    """Return the folder of a checkpoint's files that are not yet moved to their places; None if there is none."""
    return folder / f"{SAVED_FOLDER_PREFIX}{identity(state)}" if identity(state) else None


def replace_checkpoint(writing: Path, target: Path) -> None:
    """Replace a folder's checkpoint by a complete one that was written within the folder."""
    state = read_state(writing / STATE_FILE)
    listed = listed_files(target / STATE_FILE) or {}
    write_text_synced(writing / REPLACED_FILE, json.dumps([*listed]))
    saved = saved_folder(target, state)
    assert saved is not None  # files written now have a checksum
    remove_unfinished(saved)
    writing.rename(saved)
    fsync_path(target)
    (saved / STATE_FILE).replace(target / STATE_FILE)
    fsync_path(target)
    finish_replacement(target)


def finish_replacement(target: Path) -> None:
    """Finish a replacement in which a process died, and remove what others left. The folder's lock must be held."""
    try:
        state = read_state(target / STATE_FILE)
    except CheckpointError:
        state = {}
    saved = saved_folder(target, state)
    for path in [path for path in target.iterdir() if is_part_of_a_save(path.name)]:
        if path != saved:
            remove_unfinished(path)
    if saved is None or not saved.is_dir() or saved.is_symlink():
        return
    listed = state.get(FILES, {})
    remove_files(target, _replaced(saved / REPLACED_FILE) - listed.keys())
    for name in listed:
        if (saved / name).exists():
            (saved / name).replace(target / name)
    fsync_path(target)
    remove_unfinished(saved)


def _replaced(path: Path) -> set[str]:
    """Return the files that the old checkpoint listed."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):  # already removed
        return set()
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def current_path(folder: Path, saved: Path | None, name: str) -> Path:
    """Return the current path of a checkpoint's file. It may move to its place right after."""
    if saved is not None and os.path.lexists(saved / name):
        return saved / name
    return folder / name


def remove_listed(folder: Path) -> None:
    """Remove a checkpoint; unlisted files stay, with the folder.

    Raises:
        InUseError: if another process writes there.
        OSError: if a file cannot be removed.
    """
    with hold_lock(lock_path(folder, inside=True), doing="removing it"):
        finish_replacement(folder)
        if listed_files(folder / STATE_FILE) is not None:
            (folder / STATE_FILE).replace(folder / STATE_FILE_REMOVED)
            fsync_path(folder)
        finish_removal(folder)
    with suppress(OSError):  # not empty
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
    """Return True if a process has begun to remove a checkpoint, and has not ended or has died at it."""
    return (folder / STATE_FILE_REMOVED).exists() and not (folder / STATE_FILE).exists()
