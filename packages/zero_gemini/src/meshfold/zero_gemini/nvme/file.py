"""One file of blocks: locked for this process, preallocated, read and written in aligned pieces."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Literal

from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme.folder import claim, disk_error, is_still, preallocate, unlock
from meshfold.zero_gemini.nvme.layout import (
    ALIGN,
    PROBE_AT,
    Bytes,
    FileLayout,
    Header,
    aligned_empty,
    round_up,
)

Direct = bool | Literal["auto"]


class BlockFile:
    """An open, locked file. `control` is buffered: lock and header; blocks go through `data`."""

    def __init__(self, path: Path, control: int, layout: FileLayout, notes: list[str]) -> None:
        self.path, self.control, self.layout, self.notes = path, control, layout, notes
        self.data = control
        self.direct = False
        self._bounces = threading.local()

    @staticmethod
    def create(path: Path, layout: FileLayout, *, direct: Direct) -> BlockFile:
        """Make a file, replacing one that is no longer used. An error leaves no file behind."""
        notes: list[str] = []
        control = claim(path, notes)
        file = BlockFile(path, control, layout, notes)
        try:
            os.ftruncate(control, 0)
            preallocate(path, control, layout.file_bytes, first=Header(pid=os.getpid()).pack())
            os.fsync(control)
            file._choose_direct(direct)
        except BaseException as error:
            file.release()
            if isinstance(error, OSError) and not isinstance(error, DiskError):
                raise disk_error(f"{path} cannot be written: {error.strerror}.", error) from error
            raise
        return file

    def _choose_direct(self, direct: Direct) -> None:
        if direct is False:
            return
        descriptor = -1
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | getattr(os, "O_DIRECT", 0))
            if not hasattr(os, "O_DIRECT"):
                raise OSError(errno.EINVAL, "this system has no O_DIRECT")
            page = aligned_empty(ALIGN).zero_().numpy().data
            if os.pwritev(descriptor, [page], PROBE_AT) != ALIGN:
                raise OSError(errno.EINVAL, "a page was not written whole")
            if os.preadv(descriptor, [page], PROBE_AT) != ALIGN:
                raise OSError(errno.EINVAL, "a page was not read whole")
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if direct is True:
                message = f"{self.path}: direct=True, but its file system refuses O_DIRECT: {error.strerror}."
                raise disk_error(f"{message} Pass direct='auto'.", error) from error
            self.notes.append(f"{self.path}: no direct I/O here ({error.strerror}), so through the page cache.")
            return
        self.data, self.direct = descriptor, True

    def move(self, data: Bytes, offset: int, *, write: bool) -> None:
        """Write or read one piece at `offset` (on a page); past its end the rest of the page is ours to pad."""
        body = 0 if self.direct and data.ctypes.data % ALIGN else len(data)
        if self.direct:
            body -= body % ALIGN
        try:
            self._all(data[:body], offset, write=write)
        except OSError as error:
            if error.errno != errno.EFAULT:  # direct I/O cannot reach some drivers' memory: copy it
                raise
            body = 0
        if body < len(data):
            rest = data[body:]
            bounce = self._bounce(round_up(len(rest)))
            if write:
                bounce[: len(rest)], bounce[len(rest) :] = rest, 0
            self._all(bounce, offset + body, write=write)
            if not write:
                rest[:] = bounce[: len(rest)]

    def _bounce(self, nbytes: int) -> Bytes:
        """Return aligned bytes of this thread, at most one piece."""
        have: Bytes | None = getattr(self._bounces, "array", None)
        if have is None or len(have) < nbytes:
            have = self._bounces.array = aligned_empty(nbytes).numpy()
        return have[:nbytes]

    def _all(self, data: Bytes, offset: int, *, write: bool) -> None:
        view, done = data.data, 0
        while done < len(data):
            call = os.pwritev if write else os.preadv
            count = call(self.data, [view[done:]], offset + done)
            if self.direct:  # continue at a page boundary
                count -= count % ALIGN
            if count <= 0 and write:
                raise OSError(errno.EIO, "the file system accepted no more bytes and gave no reason")
            if count <= 0:
                size = os.fstat(self.data).st_size
                raise OSError(errno.EIO, f"it is truncated to {size} of {self.layout.file_bytes} bytes")
            done += count

    def sync(self) -> None:
        """Wait until the blocks are on the disk."""
        os.fsync(self.data)

    def release(self, *, owner: int | None = None) -> None:
        """Remove the file and its lock; also after a failure, and again. A forked child (not `owner`) removes nothing."""
        if self.control < 0 or (owner is not None and owner != os.getpid()):
            return
        control, data, self.control, self.data = self.control, self.data, -1, -1
        if is_still(self.path, control):
            self.path.unlink(missing_ok=True)
        if data != control:
            os.close(data)
        unlock(control)
