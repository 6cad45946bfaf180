"""What the files and folders of a checkpoint are called.

::

    ckpt/                       a checkpoint
      state.json                its index: says what it is of, and lists its other files
      model.safetensors ...
      .saving/                  the next one, while it is written
      .saved-1f0c.../           the next one, complete: its files are moved to their places, one after the other
      .lock                     held by the process that writes
    .new.writing/               a checkpoint "new" that was not there before, while it is written
    .new.lock                   held by the process that writes it
    .new.old/                   one that an earlier version was replacing when it died
"""

from __future__ import annotations

from pathlib import Path

STATE_FILE, SCHEDULER_FILE, EXTRA_STATE_FILE = "state.json", "scheduler.pt", "extra_state.pt"
STATE_FILE_REMOVED = "state.json.removing"
"""The index of a checkpoint that is being removed: its files go first."""

REPLACED_FILE = "replaced.json"
"""The index before, within ``.saved-...``: its files go when the new ones come."""

SAVING_FOLDER, SAVED_FOLDER_PREFIX, LOCK_FILE = ".saving", ".saved-", ".lock"


def set_aside_path(target: Path) -> Path:
    """Return where an earlier version put a checkpoint aside while the next one took its place."""
    return target.with_name(f".{target.name}.old")


def writing_path(target: Path, *, inside: bool) -> Path:
    """Return where a checkpoint is written: within its folder if that exists, else beside it."""
    return target / SAVING_FOLDER if inside else target.with_name(f".{target.name}.writing")


def lock_path(target: Path, *, inside: bool) -> Path:
    """Return the lock of whoever writes there."""
    return target / LOCK_FILE if inside else target.with_name(f".{target.name}.lock")
