"""Offload folder of the disk store: checks and locks before training, and removal of what killed processes left."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme.layout import ALIGN, MAGIC, Header

_PATIENCE, _PAUSE_SECONDS = 500, 0.01
_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_error(message: str, cause: OSError) -> DiskError:
    """Return a `DiskError` with the system's error number, so that callers can tell a full disk from a broken one."""
    error = DiskError(message)
    error.errno = cause.errno
    return error


def block_path(folder: str | os.PathLike[str], name: str, rank: int) -> Path:
    """Return the file of one rank in a folder that exists.

    Raises:
        DiskError: the folder is missing (names the nearest parent that exists) or is not a folder; a bad name or rank.
    """
    if not name or "/" in name or "\0" in name or not 0 <= rank < 1 << 32:
        raise DiskError(f"name={name!r}, rank={rank}: need a part of a file name and a rank from 0 on.")
    path = Path(folder).absolute()
    if path.is_dir():
        return path / f"meshfold-{name}-rank{rank:05d}.blocks"
    for parent in (path, *path.parents):
        if parent.is_dir():
            raise DiskError(f"The folder {path} does not exist ({parent} does). Create it, or name another.")
        if parent.exists() or parent.is_symlink():
            what = "a link to nowhere" if not parent.exists() else "not a folder"
            raise DiskError(f"{parent} is {what}, so {path} cannot hold offloaded blocks. Name another folder.")
    raise DiskError(f"The folder {path} does not exist.")


def _lock(path: Path) -> int:
    """Open or create a file for only this process; return the descriptor that holds the lock.

    Raises:
        DiskError: if it cannot be opened or created (read-only, ...), is not a plain file, or is in use.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CREAT
    while True:
        try:
            control = os.open(path, flags, 0o600)
        except OSError as error:
            raise _cannot_open(path, error) from error
        try:
            if not stat.S_ISREG(os.fstat(control).st_mode):
                raise DiskError(f"{path} is not a plain file. Delete it, or name another folder.")
            try:
                fcntl.flock(control, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"{path} is in use{_by(control)}. Give each store of a folder a name of its own."
                raise disk_error(message, error) from None
            except OSError as error:
                raise DiskError(
                    f"{path}: its file system has no file locks ({error.strerror}). Name another."
                ) from error
            if is_still(path, control):
                return control
        except BaseException:
            os.close(control)
            raise
        os.close(control)  # the previous holder removed it between our open and our lock


def claim(path: Path, notes: list[str]) -> int:
    """Lock the file of a new store; one of ours that is no longer used may be replaced, and is noted.

    Raises:
        DiskError: as `_lock`, or the file is not one of ours.
    """
    with alone_in(path.parent):
        control = _lock(path)
    try:
        start = os.pread(control, ALIGN, 0)
        if start and start[: len(MAGIC)] != MAGIC:
            raise DiskError(f"{path} is not a Meshfold block file, and is not overwritten. Move it away.")
    except OSError as error:
        unlock(control)
        if isinstance(error, DiskError):
            raise
        raise disk_error(f"{path} cannot be read: {error.strerror}. Move it away.", error) from error
    if start:
        try:
            header = Header.unpack(start, str(path))
            notes.append(f"{path}: replaced the file of process {header.pid}, which no longer uses it.")
        except DiskError as error:
            notes.append(f"{path}: replaced an unusable file: {error}")
    return control


def is_others(error: DiskError, path: Path) -> bool:
    """Return True if a file could not be opened because another store or user has it."""
    return error.errno == errno.EAGAIN or (error.errno in (errno.EACCES, errno.EPERM) and path.exists())


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Context manager: only one process at a time makes files in the folder, and none while another removes some.

    This does not hold if folders cannot be locked, or a process stopped with the lock. Then at worst a file that was
    just made seems to be in use.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        for _ in range(_PATIENCE):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_SECONDS)
            except OSError:
                break
            else:
                break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def unlock(control: int) -> None:
    """Unlock and close a file. Closing only would leave the lock with forked children, which share the descriptor."""
    fcntl.flock(control, fcntl.LOCK_UN)
    os.close(control)


def preallocate(path: Path, control: int, nbytes: int, *, first: bytes) -> None:
    """Reserve `nbytes` of disk, after the page `first`, which marks the file as ours in case the process dies.

    Raises:
        DiskError: says how many bytes are needed, free and missing.
    """
    free = free_bytes(path.parent)
    if free is not None and free < nbytes:  # fail at once: the system would fill the disk first
        raise _no_space(path, nbytes, free, OSError(errno.ENOSPC, ""))
    try:
        os.pwrite(control, first, 0)
        try:
            os.posix_fallocate(control, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            _fill(control, len(first), nbytes)
    except OSError as error:
        if error.errno in _FULL:
            os.ftruncate(control, 0)
            raise _no_space(path, nbytes, free_bytes(path.parent), error) from error
        if error.errno == errno.EFBIG:
            message = f"{path} would have {nbytes} bytes, more than one file may have here (see `ulimit -f`)."
            raise disk_error(message, error) from error
        raise


def _fill(control: int, start: int, end: int) -> None:
    """Reserve space by writing zeros, where the system has no call for it."""
    zeros = memoryview(bytes(1 << 20))
    while start < end:
        start += os.pwrite(control, zeros[: end - start], start)


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of a folder's file system; None if unknown."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _no_space(path: Path, wanted: int, free: int | None, cause: OSError) -> DiskError:
    known = "" if free is None else f", {free} are free and {max(wanted - free, 0)} are missing"
    if free is not None and free >= wanted:
        known = f", {free} are free, but not for this user (a quota, or other ranks took them meanwhile)"
    return disk_error(
        f"No space for {path}: {wanted} bytes are wanted{known}. Free some, or offload less to disk.", cause
    )


def _cannot_open(path: Path, error: OSError) -> DiskError:
    if error.errno == errno.ELOOP:
        message = f"{path} is a link, which is not followed. Delete it."
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        message = f"{path} cannot be opened for writing: {error.strerror}. Name a folder that this user may write."
    else:
        message = f"{path} cannot be opened: {error.strerror}. Name another folder."
    return disk_error(message, error)


def is_still(path: Path, control: int) -> bool:
    """Return True if `path` names the open file, and not a newer one."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(control))
    except FileNotFoundError:
        return False


def _by(control: int) -> str:
    try:
        pid = Header.unpack(os.pread(control, ALIGN, 0), "").pid
    except DiskError:
        return ""
    return " by this process" if pid == os.getpid() else f" by process {pid}"


_ANY = "meshfold-*-rank*.blocks"


def sweep(folder: str | os.PathLike[str]) -> list[str]:
    """Remove files of killed processes in a folder: stores of any rank without a lock.

    Returns:
        A note on each.
    """
    notes = []
    with alone_in(Path(folder)):
        for path in sorted(Path(folder).glob(_ANY)):
            try:
                control = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:  # another user's, or already removed
                continue
            try:
                note = _left_behind(path, control)
                if note and is_still(path, control):
                    path.unlink(missing_ok=True)
                    notes.append(note)
            except OSError:  # in use
                continue
            finally:
                unlock(control)
    return notes


def _left_behind(path: Path, control: int) -> str:
    """Lock a file that no process uses any more and return a note about it; return "" for any other file.

    Raises:
        OSError: if it is in use.
    """
    if not stat.S_ISREG(os.fstat(control).st_mode):
        return ""
    note = _as_left_behind(path, control)
    if note:  # checked first: a process may be about to lock a file that is in use
        fcntl.flock(control, fcntl.LOCK_EX | fcntl.LOCK_NB)
        note = _as_left_behind(path, control)
    return note


def _as_left_behind(path: Path, control: int) -> str:
    start = os.pread(control, ALIGN, 0)
    if not start:
        return f"{path}: removed: an empty file left by a killed process."
    try:
        header = Header.unpack(start, str(path))
    except DiskError:
        return ""  # not ours, or incomplete: leave it to the user
    size = os.fstat(control).st_blocks * 512
    return f"{path}: removed: {size:,} bytes left by process {header.pid}, which was killed."
