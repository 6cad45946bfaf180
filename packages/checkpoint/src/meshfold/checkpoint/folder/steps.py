"""A folder of checkpoints, one per step: names, the last complete one, and removal of old ones.

::

    runs/step-00000100/   complete: it has a state.json, and every file that this names
    runs/step-00000120/
    runs/.step-00000140.writing/   being written, or left by a process that died: never counts as a checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshfold.checkpoint.errors import CheckpointError
from meshfold.checkpoint.file_names import STATE_FILE, lock_path, remove_unfinished, set_aside_path
from meshfold.checkpoint.folder.lock import hold_lock, is_locked
from meshfold.checkpoint.folder.replacement import (
    current_path,
    discard_set_aside,
    finish_replacement,
    is_being_removed,
    remove_listed,
    saved_folder,
)
from meshfold.checkpoint.folder.writing import clear_beside
from meshfold.checkpoint.state.state_file import FILES, read_state

_NAME = re.compile(r"step-(\d{8,})")
_ENDINGS = ("writing", "old", "removing")
_HIDDEN = re.compile(rf"\.step-(\d{{8,}})\.({'|'.join(_ENDINGS)})")


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder for the checkpoint of a step: ``step-00000120``.

    Raises:
        CheckpointError: for a step below 0.
    """
    if step < 0:
        raise CheckpointError(f"step={step}: give a whole number from 0 up")
    return Path(folder) / f"step-{step:08}"


def latest(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step, or None. Damaged and unfinished ones are skipped."""
    return next(iter(complete_checkpoints(folder)), None)


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all except the last ``keep`` complete checkpoints, and remains of dead processes.

    Only files that a checkpoint's index lists are removed. A folder with other files in it stays. Call it on one rank. Checkpoints
    that are being written are left alone, and those being removed are never mistaken for them.

    Returns:
        The removed checkpoints, the earliest first.

    Raises:
        CheckpointError: for ``keep`` below 1, or if one cannot be removed.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise CheckpointError(f"keep={keep!r}: give the number of checkpoints to keep, a whole number from 1 up")
    folder = Path(folder)
    found = complete_checkpoints(folder)
    if not found:
        return []
    gone = [path for path in found[keep:][::-1] if not is_locked(lock_path(path, inside=True))]
    for path in gone:
        remove_checkpoint(path)
    with _removing(folder):
        for path in [*folder.iterdir()]:
            if _NAME.fullmatch(path.name) and is_being_removed(path):
                remove_checkpoint(path)
            named = _HIDDEN.fullmatch(path.name)
            if named is not None and int(named[1]) <= step_of(found[0]):
                whole = folder / f"step-{named[1]}"
                # This may be the only copy of a checkpoint: an earlier version of the library can die between two renames.
                if is_complete(whole) or not is_complete(set_aside_path(whole)):
                    _clear(whole)
    return gone


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; if interrupted, the rest of it never looks complete. Call it on one rank.

    Raises:
        CheckpointError: if it cannot be removed.
    """
    with _removing(path.parent):
        for place in (set_aside_path(path), path):
            discard_set_aside(place)


def remove_leftovers(path: Path) -> None:
    """Remove remains of dead processes' saves of a checkpoint, if it is complete under its own name. Call it on one rank."""
    if is_complete(path):
        with suppress(OSError, CheckpointError), hold_lock(lock_path(path, inside=True), doing="tidying it"):
            finish_replacement(path)
        _clear(path)


def _clear(path: Path) -> None:
    """Remove remains of dead processes next to a checkpoint."""
    clear_beside(path)
    with suppress(OSError, CheckpointError):
        removed = path.with_name(f".{path.name}.removing")  # left by an earlier version
        if removed.is_dir():
            remove_listed(removed)
            remove_unfinished(removed)


@contextmanager
def _removing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot remove an old checkpoint in {folder}: {error}; remove it by hand, or let this user write there"
        ) from error


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the last first. Damaged and unfinished ones are skipped."""
    return [path for path in all_checkpoints(folder) if is_complete(path) or is_complete(set_aside_path(path))]


def all_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, complete or damaged, the last first, without those that are being written."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    names = {entry.name for entry in folder.iterdir()}
    # Between the two renames of a replacement only the old checkpoint exists, under its other name.
    names |= {f"step-{named[1]}" for name in names if (named := _HIDDEN.fullmatch(name)) and named[2] == "old"}
    found = (folder / name for name in names if _NAME.fullmatch(name))
    return sorted((path for path in found if not is_being_removed(path)), key=step_of)[::-1]


def is_complete(path: Path) -> bool:
    """Return True if a folder is a checkpoint, with every file that its ``state.json`` lists in its full size."""
    try:
        state = read_state(path / STATE_FILE)
        saved = saved_folder(path, state)
        return all(
            current_path(path, saved, name).stat().st_size == size for name, size in state.get(FILES, {}).items()
        )
    except (OSError, CheckpointError):
        return False


def step_of(path: Path) -> int:
    """Return the step that a folder is named after."""
    return int(path.name.partition("-")[2])
