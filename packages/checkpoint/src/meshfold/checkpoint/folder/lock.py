"""A lock on a folder, which only one process at a time writes to. The kernel releases it when the process ends or is killed.

::

    with hold_lock(out / ".run.lock", doing="training into it"):
        ...

Rank 0 holds it for a run; the others learn of a refusal through
:func:`meshfold.engine.world.fail_together`.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshfold.checkpoint.errors import InUseError

_held: set[int] = set()
"""Descriptors of the locks of this process."""


@contextmanager
def hold_lock(lock: Path, *, doing: str, folder: Path | None = None) -> Iterator[None]:
    """Context manager: hold a lock file, which is removed at the end.

    The lock is advisory (``flock``). A file system without locks lets every process in.

    Args:
        lock: the file, in an existing folder. The lock of a killed process is taken over.
        doing: for the message of a process that is refused: ``"process 12 on HOST has been {doing} since ..."``.
        folder: the locked folder, for the message; None: the folder of the file.

    Raises:
        InUseError: if another process holds it; names the process, host and time.
        OSError: if the file cannot be made.
    """
    descriptor = _take(lock, folder or lock.parent)
    _held.add(descriptor)
    try:
        _sign(descriptor, doing)
        yield
    finally:
        if descriptor in _held:  # a child forked in the meantime has closed it
            _held.discard(descriptor)
            if _is_at(descriptor, lock):
                with suppress(OSError):
                    lock.unlink()
            os.close(descriptor)


def is_locked(lock: Path) -> bool:
    """Return True if a process holds a lock file, as far as the file system can tell. Changes nothing."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _take(lock: Path, folder: Path) -> int:
    """Open the file and lock it."""
    while True:
        descriptor = _open(lock)
        if not _try_lock(descriptor):
            said = _holder(descriptor)
            os.close(descriptor)
            raise InUseError(f"{folder} is in use: {said}. Wait until it ends, or give another folder")
        if _is_at(descriptor, lock):
            return descriptor
        os.close(descriptor)  # its holder has exited and removed it since


def _open(lock: Path) -> int:
    flags = os.O_CREAT | os.O_NOFOLLOW  # never write through someone else's link
    try:
        return os.open(lock, os.O_RDWR | flags, 0o666)
    except PermissionError:
        return os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)  # the file of another user, whose process was killed


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        pass
    return True


def _is_at(descriptor: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), lock.lstat())
    except OSError:
        return False


def _sign(descriptor: int, doing: str) -> None:
    """Write down who holds the lock."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since, "doing": doing})
    with suppress(OSError):  # another user's file, or a full disk: the lock works without the note
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _holder(descriptor: int) -> str:
    """Return who holds the lock: ``process 12 on HOST has been training into it since ...``."""
    try:
        said = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {said['pid']} on {said['host']} has been {said['doing']} since {said['since']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # not written yet
        return "another process is writing there"


def _forget() -> None:
    """Close the locks in a forked child, which would hold them beyond the end of its parent."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
