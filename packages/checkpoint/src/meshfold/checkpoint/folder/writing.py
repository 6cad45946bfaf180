"""The folder of a checkpoint: written aside, synced to disk, and put in place when complete.

If the folder does not exist, the checkpoint is written next to it and gets its name in one rename. If it does, it is written within
it (:mod:`meshfold.checkpoint.folder.replacement`), so that everything else in the folder, or a mount point, stays. Either way
there is a complete checkpoint at any time: the old one, then the new one.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from meshfold.checkpoint.errors import CheckpointError, InUseError, advice_on
from meshfold.checkpoint.file_names import (
    LOCK_FILE,
    STATE_FILE,
    lock_path,
    may_be_listed,
    remove_unfinished,
    set_aside_path,
    writing_path,
)
from meshfold.checkpoint.files import fsync_path, write_text_synced
from meshfold.checkpoint.folder.lock import hold_lock
from meshfold.checkpoint.folder.replacement import (
    discard_set_aside,
    finish_removal,
    finish_replacement,
    is_part_of_a_save,
    replace_checkpoint,
)
from meshfold.checkpoint.state.state_file import (
    CHECKSUMS,
    FILES,
    FORMAT_WHOLE,
    file_checksum,
    listed_files,
    with_checksum,
)


def resolve_folder(path: str | os.PathLike[str]) -> Path:
    """Return the absolute folder; for a link its target, so that the link stays."""
    found = Path(path).absolute()
    return Path(os.path.realpath(found)) if found.is_symlink() else found


def begin_checkpoint(
    target: Path, mine: ExitStack, files: Iterable[str] = (), *, doing: str = "saving into it"
) -> Path:
    """Make the folder to write in, exclusive to this process until ``mine`` closes, which removes its remains.

    Args:
        target: the checkpoint's folder; it may exist.
        mine: closed when all is done, or has failed.
        files: names that will be written; other programs' files with these names are refused now.
        doing: description of this process for others.

    Returns:
        The folder that is written.

    Raises:
        InUseError: if another process writes there.
        OSError: if the folder is anything but a checkpoint, or cannot be made.
    """
    put_back(target)
    inside = target.exists()
    if inside and not target.is_dir():
        raise OSError(f"{target} exists and is not a checkpoint: remove it or choose another path")
    if not inside:
        make_durable_folder(target.parent)
    mine.enter_context(hold_lock(lock_path(target, inside=inside), doing=doing, folder=target))
    if inside:
        finish_replacement(target)
        finish_removal(target)
        check_free(target, files)
    writing = writing_path(target, inside=inside)
    remove_unfinished(writing)  # left by a run that was killed
    try:
        writing.mkdir()
    except FileExistsError:
        raise OSError(
            f"{writing} is in the way: it has files that are not a checkpoint's. Move it away, or save elsewhere"
        ) from None
    made = writing.stat()
    mine.callback(lambda: _remove(writing, made))
    return writing


def put_back(target: Path) -> None:
    """Restore the name of a checkpoint that an earlier version moved aside before it died, if the name is free."""
    old = set_aside_path(target)
    with suppress(OSError):  # the name is taken by a folder that is not empty: callers check that one
        if listed_files(old / STATE_FILE) is not None and (not target.exists() or not any(target.iterdir())):
            old.rename(target)


def check_free(target: Path, files: Iterable[str] = ()) -> None:
    """Raise an OSError if a checkpoint in this folder would replace anything else.

    Args:
        target: a folder that exists.
        files: names that will be written.
    """
    listed = listed_files(target / STATE_FILE)
    there = [path.name for path in target.iterdir() if not _is_ours(path.name)]
    if (target / STATE_FILE).exists() and listed is None:
        raise OSError(
            f"{target / STATE_FILE} is damaged or not a checkpoint's, so it is unknown which files here belong to a "
            "checkpoint: save elsewhere, or move it away"
        )
    if listed is None and there:
        raise OSError(f"{target} exists and is not a checkpoint: remove it or choose another path")
    for name in files:
        path = target / name
        if (name not in (listed or {}) and os.path.lexists(path)) or (path.is_dir() and not path.is_symlink()):
            raise OSError(
                f"{path} is in the way: the checkpoint there does not list it, so something else wrote it. Move it away, or save "
                "elsewhere"
            )


def _is_ours(name: str) -> bool:
    """Return True for a name that shows a running or aborted save."""
    return name == LOCK_FILE or is_part_of_a_save(name)


def _remove(folder: Path, made: os.stat_result) -> None:
    """Remove a started folder, unless another one has its name now."""
    with suppress(OSError):
        if os.path.samestat(folder.stat(), made):
            remove_unfinished(folder)


def _empty(folder: Path) -> None:
    """Remove the files of a folder, if it is still there."""
    with suppress(OSError):
        for path in [*folder.iterdir()]:
            path.unlink()


def make_durable_folder(folder: Path) -> None:
    """Make a folder with its parents, and sync their entries to disk."""
    if not folder.is_dir():
        make_durable_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def commit_checkpoint(writing: Path, target: Path, state: Mapping[str, Any], small_files: Mapping[str, Any]) -> None:
    """Write the small files, sync the folder to disk and put it in place.

    Args:
        writing: the folder that :func:`begin_checkpoint` returned; its lock is still held.
        target: its destination.
        state: the content of ``state.json``.
        small_files: file name to its content, written by ``torch.save``.
    """
    for name, content in small_files.items():
        made = io.BytesIO()
        torch.save(content, made)  # into memory: of a full disk torch raises an error without the reason
        (writing / name).write_bytes(made.getbuffer())
    paths = sorted(writing.iterdir())
    for path in paths:
        if path.suffix != ".safetensors":  # the writers of safetensors have synced theirs
            fsync_path(path)
    files = {path.name: path.stat().st_size for path in paths}
    whole = with_checksum({**state, FILES: files, CHECKSUMS: {path.name: file_checksum(path) for path in paths}})
    write_text_synced(writing / STATE_FILE, json.dumps(whole, indent=1))
    fsync_path(writing)
    if writing.parent == target:
        check_free(target, files)
        replace_checkpoint(writing, target)
    else:
        try:
            writing.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise OSError(
                f"{target} was created by another process while it was being written: give each run a path of its own"
            ) from error
        fsync_path(target.parent)
    clear_beside(target)


def clear_beside(target: Path) -> None:
    """Remove remains of dead processes next to a complete checkpoint, as far as possible."""
    writing, lock = writing_path(target, inside=False), lock_path(target, inside=False)
    with suppress(OSError, InUseError):
        discard_set_aside(set_aside_path(target))
        if writing.is_dir() or lock.exists():
            with hold_lock(lock, doing="removing what was left there"):
                remove_unfinished(writing)


@contextmanager
def new_checkpoint(
    target: str | os.PathLike[str], state: Mapping[str, Any] | None = None, *, doing: str = "saving into it"
) -> Iterator[Path]:
    """Context manager: yield a folder to write a checkpoint's files in, which is put in place at the end, complete.

    ::

        with (
            new_checkpoint(step_folder(run, 100), {"step": 100}) as folder,
            TensorWriter(folder / "model.safetensors", announced) as writer,
        ):
            writer.write("weight", weight)

    Until then, and after an error, the folder has the checkpoint that was there before, or none. The body closes its files. Call it
    on one process.

    Args:
        target: the checkpoint's folder, which may hold a checkpoint, and nothing else of these names. A link stays one.
        state: entries of its ``state.json``, as JSON has them.
        doing: description of this process for others.

    Raises:
        CheckpointError: if it cannot be written, has no file whose name begins with ``model``, or one of another name than
            checkpoints have.
        InUseError: if another process writes there.
    """
    final = resolve_folder(target)
    with ExitStack() as mine:
        try:
            writing = begin_checkpoint(final, mine, doing=doing)
            mine.callback(_empty, writing)  # all in it is this process's, whatever its name
            yield writing
            names = [path.name for path in writing.iterdir()]
            if not any(name.startswith("model") for name in names):
                raise CheckpointError(f"{final}: no file of a model was written; write one named model.safetensors")
            if strange := [name for name in names if not may_be_listed(name)]:
                raise CheckpointError(
                    f"{final}: {strange[0]!r} is no name of a checkpoint's file: write model.safetensors, optimizer.safetensors, "
                    "scheduler.pt or extra_state.pt, and put small values into state"
                )
            commit_checkpoint(writing, final, {"format": FORMAT_WHOLE, **(state or {})}, {})
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {final}: {with_advice(error)}") from error


def with_advice(error: Exception | None) -> Exception | None:
    """Return a write error with advice."""
    if isinstance(error, OSError) and (advice := advice_on(error)) is not None:
        told = type(error)(f"{error}: {advice}")
        told.__cause__ = error
        return told
    return error


def error_of(action: Callable[[], None]) -> Exception | None:
    """Return the exception of an action without communication, or None, so that it can be reported to all ranks first."""
    try:
        action()
    except Exception as error:
        return error
    return None
