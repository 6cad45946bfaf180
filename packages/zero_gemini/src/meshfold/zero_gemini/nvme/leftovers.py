"""Removes what killed processes left in a folder."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme.folder import alone_in, is_still, unlock
from meshfold.zero_gemini.nvme.layout import Header
from meshfold.zero_gemini.nvme.memory import ALIGN

_ANY = "meshfold-*-rank*.blocks"


def sweep(folder: str | os.PathLike[str]) -> list[str]:
    """Remove what killed processes left in a folder: stores of any rank that nobody locks.

    Returns:
        A note on each.
    """
    notes = []
    with alone_in(Path(folder)):
        for path in sorted(Path(folder).glob(_ANY)):
            try:
                control = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:  # of another user, or gone already
                continue
            try:
                note = _left_behind(path, control)
                if note and is_still(path, control):
                    path.unlink(missing_ok=True)
                    notes.append(note)
            except OSError:  # somebody uses it
                continue
            finally:
                unlock(control)
    return notes


def _left_behind(path: Path, control: int) -> str:
    """Lock a file that no process uses any more and return a note about it; empty for any other file.

    Raises:
        OSError: if somebody uses it.
    """
    if not stat.S_ISREG(os.fstat(control).st_mode):
        return ""
    note = _as_left_behind(path, control)
    if note:  # if nobody uses it: others are not locked even for a moment, as somebody may be about to
        fcntl.flock(control, fcntl.LOCK_EX | fcntl.LOCK_NB)
        note = _as_left_behind(path, control)
    return note


def _as_left_behind(path: Path, control: int) -> str:
    start = os.pread(control, ALIGN, 0)
    if not start:
        return f"{path}: removed, an empty file that a process left which was killed."
    try:
        header = Header.unpack(start, str(path))
    except DiskError:
        return ""  # not ours, or not whole: left to a person
    size = os.fstat(control).st_blocks * 512
    return f"{path}: removed, {size:,} bytes that process {header.pid} left, which was killed."
