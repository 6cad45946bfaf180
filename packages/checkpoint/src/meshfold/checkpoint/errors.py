"""Errors of files and folders of weights."""

from __future__ import annotations

import errno

from meshfold.mesh import MeshfoldError


class CheckpointError(MeshfoldError, RuntimeError):
    """A checkpoint that cannot be written or read, or that belongs to another model or optimizer."""


class InUseError(CheckpointError):
    """A folder in which another process is writing."""


class FileWriteError(MeshfoldError, OSError):
    """A file that cannot be written, with the reason and advice; such as on a full disk."""


_ADVICE = {
    errno.ENOSPC: "make room on that disk, or save elsewhere",
    errno.EDQUOT: "the user's quota is used up: remove something, or save elsewhere",
    errno.EFBIG: "files of that size are not allowed there: raise the limit (ulimit -f), or save elsewhere",
    errno.EACCES: "let this user write there, or save elsewhere",
    errno.EPERM: "let this user write there, or save elsewhere",
    errno.ENOENT: "make its folder, or save elsewhere",
    errno.EROFS: "it is mounted for reading only: save elsewhere",
}


def advice_on(error: OSError) -> str | None:
    """Return what to do about a file that could not be written, or None."""
    return None if error.errno is None else _ADVICE.get(error.errno)
