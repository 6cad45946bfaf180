"""The folder of a checkpoint: made under another name, brought to the disk, and given its own name when all of it is there.

At any instant there is a complete checkpoint under the name: the new one and the one before change places, where the file system
can do that. Where it cannot, there is an instant between two renames at which the one before is under ``.NAME.old``, and
readers take that. What a process that dies then leaves beside the checkpoint, the next save removes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from meshfold.engine.checkpoints.exchange import exchange

STATE, SCHEDULER = "state.json", "scheduler.pt"

_ADVICE = {
    errno.ENOSPC: "make room on that disk, or save elsewhere",
    errno.EDQUOT: "the user's quota is used up: remove something, or save elsewhere",
    errno.EFBIG: "files of that size are not allowed there: raise the limit (ulimit -f), or save elsewhere",
    errno.EACCES: "let this user write there, or save elsewhere",
    errno.EPERM: "let this user write there, or save elsewhere",
    errno.EROFS: "it is mounted for reading only: save elsewhere",
}


def place_of(path: str | os.PathLike[str]) -> Path:
    """The folder; of a link to one that which it points to, so that the link stays."""
    found = Path(path).absolute()
    return Path(os.path.realpath(found)) if found.is_symlink() else found


def begin(writing: Path, target: Path, mine: ExitStack) -> None:
    """Make the folder that is written, for this process alone until the end of ``mine``, when what is left of it goes."""
    _check_free(target)
    make(writing.parent)
    if writing.exists():  # left by a run that died
        with locked(writing):
            shutil.rmtree(writing)
    writing.mkdir()
    mine.enter_context(locked(writing))
    made = writing.stat()
    mine.callback(lambda: _remove(writing, made))


def _remove(folder: Path, made: os.stat_result) -> None:
    """Remove a folder, unless it has gone and another one has its name."""
    with suppress(OSError):
        if os.path.samestat(folder.stat(), made):
            shutil.rmtree(folder, ignore_errors=True)


def make(folder: Path) -> None:
    """A folder with its parents, on the disk."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """For this process alone, where the file system can tell.

    Raises:
        OSError: if it is another's.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                "another process is writing it at this moment; give each run a path of its own"
            ) from None
        except OSError:  # such as some network file systems
            pass
        yield
    finally:
        with suppress(OSError):  # a forked child may have the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _check_free(target: Path) -> None:
    if target.exists() and not (target / STATE).exists() and (not target.is_dir() or any(target.iterdir())):
        raise OSError(f"{target} is there and is no checkpoint: remove it or choose another path")


def old_of(target: Path) -> Path:
    """What the checkpoint before is called while the next one takes its place."""
    return target.with_name(f".{target.name}.old")


def writing_of(target: Path) -> Path:
    """What a checkpoint is called while it is written."""
    return target.with_name(f".{target.name}.writing")


def clear(writing: Path) -> None:
    """Remove what is left of a save that failed, unless another process writes there now."""
    with suppress(OSError), locked(writing):
        shutil.rmtree(writing)


def finish(writing: Path, target: Path, state: dict[str, Any], small_files: Mapping[str, Any]) -> None:
    """Write what is small, bring the folder to the disk and give it its name.

    Args:
        writing: the folder.
        target: its name.
        state: what goes into ``state.json``.
        small_files: file name to what ``torch.save`` writes there.
    """
    for name, content in small_files.items():
        torch.save(content, writing / name)
    for small in writing.iterdir():
        if small.suffix != ".safetensors":  # their writers have done it
            sync(small)
    sizes = {path.name: path.stat().st_size for path in sorted(writing.iterdir())}
    with (writing / STATE).open("w") as file:
        json.dump({**state, "files": sizes}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(writing)
    gone = [old_of(target)]  # which may be there since a process died
    with ExitStack() as others:
        if (target / STATE).exists():
            # Until it is gone, so that no other process puts something in its place under the name that it has then.
            others.enter_context(locked(target))
            gone.append(_replace(target, writing))
        else:
            _check_free(target)
            writing.rename(target)
        sync(target.parent)
        for left in gone:  # the new one is complete, whatever becomes of these
            shutil.rmtree(left, ignore_errors=True)


def _replace(target: Path, writing: Path) -> Path:
    """Give the folder the name of a complete checkpoint; where that one is then."""
    if exchange(writing, target):
        return writing
    old = old_of(target)
    if old.exists():
        shutil.rmtree(old)
    target.rename(old)
    try:
        writing.rename(target)
    except OSError:
        old.rename(target)
        raise
    return old


def sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def advised(error: Exception | None) -> Exception | None:
    """An error of writing with what to do about it."""
    if isinstance(error, OSError) and error.errno in _ADVICE:
        told = type(error)(f"{error}: {_ADVICE[error.errno]}")
        told.__cause__ = error
        return told
    return error


def attempt(action: Callable[[], None]) -> Exception | None:
    """What an action without communication raised, if it did: the ranks have to hear of it first."""
    try:
        action()
    except Exception as error:
        return error
    return None
