"""Folders of checkpoints: written aside, put in place atomically, listed, locked and removed."""

from __future__ import annotations

from meshfold.checkpoint.file_names import (
    EXTRA_STATE_FILE,
    LOCK_FILE,
    SAVING_FOLDER,
    SCHEDULER_FILE,
    STATE_FILE,
    lock_path,
    remove_unfinished,
    set_aside_path,
    writing_path,
)
from meshfold.checkpoint.folder.lock import hold_lock, is_locked
from meshfold.checkpoint.folder.reading import OpenedCheckpoint, open_checkpoint
from meshfold.checkpoint.folder.replacement import current_path, saved_folder
from meshfold.checkpoint.folder.steps import (
    all_checkpoints,
    complete_checkpoints,
    is_complete,
    latest,
    prune,
    remove_checkpoint,
    remove_leftovers,
    step_folder,
    step_of,
)
from meshfold.checkpoint.folder.writing import (
    begin_checkpoint,
    commit_checkpoint,
    error_of,
    make_durable_folder,
    new_checkpoint,
    resolve_folder,
    with_advice,
)

__all__ = [
    "EXTRA_STATE_FILE",
    "LOCK_FILE",
    "SAVING_FOLDER",
    "SCHEDULER_FILE",
    "STATE_FILE",
    "OpenedCheckpoint",
    "all_checkpoints",
    "begin_checkpoint",
    "commit_checkpoint",
    "complete_checkpoints",
    "current_path",
    "error_of",
    "hold_lock",
    "is_complete",
    "is_locked",
    "latest",
    "lock_path",
    "make_durable_folder",
    "new_checkpoint",
    "open_checkpoint",
    "prune",
    "remove_checkpoint",
    "remove_leftovers",
    "remove_unfinished",
    "resolve_folder",
    "saved_folder",
    "set_aside_path",
    "step_folder",
    "step_of",
    "with_advice",
    "writing_path",
]
