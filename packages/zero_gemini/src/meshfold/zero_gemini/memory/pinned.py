"""Page-locked host memory, of exact size, that starts at alternating pages."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

PAGE_BYTES = 4096
"""Unit in which host memory is locked, and of direct I/O."""

_HUGE_PAGE_BYTES = 2**21
_STARTS = 16
_turns = itertools.count()
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context of the process


class _Pages(mmap.mmap):
    """Pages that are unlocked right before they are unmapped, once nothing refers to them."""

    _unlock: Callable[[int], object] | None = None
    _address = 0
    _process = 0

    def advise(self, advice: str) -> None:
        with contextlib.suppress(OSError):  # only advice: older kernels lack some kinds
            if hasattr(mmap, advice):
                self.madvise(getattr(mmap, advice))

    def lock(self, address: int, nbytes: int) -> None:
        # A fork (workers of a data loader) would copy locked pages one by one, so children get none of them.
        self.advise("MADV_DONTFORK")
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
        if status:
            raise OSError(
                f"CUDA could not lock {nbytes:,} bytes of host memory (error {status}); ask for less, or raise the "
                "limit of locked memory (ulimit -l)"
            )
        self._unlock, self._address, self._process = runtime.cudaHostUnregister, address, os.getpid()

    def __del__(self) -> None:
        if self._unlock is not None and self._process == os.getpid():
            self._unlock(self._address)


def page_locked(nbytes: int) -> Tensor:
    """Return zeros, uint8 ``nbytes``, on separate pages, locked if CUDA is available.

    ``torch.empty(..., pin_memory=True)`` rounds up to a power of two (17 GiB cost 32) and caches freed memory. These are exact, and
    return to the system with the last tensor on them.

    Tensors of equal size follow each other in the address space. If the size is a power of two, a kernel that reads several of them
    would hit the same memory bank or cache set each time. (A step of Adam on planes 256 MiB apart reached 10 to 12 GB/s of a core's
    40.) So large tensors begin on one of 16 pages in turn; the pages around them are never touched and take no memory.

    Raises:
        OSError: if the system has less memory, or refuses to lock it.
    """
    is_large = nbytes >= _HUGE_PAGE_BYTES
    room, front = (_STARTS * PAGE_BYTES if is_large else 0), 0
    pages = _Pages(-1, room + nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_large:
        pages.advise("MADV_HUGEPAGE")  # one page fault and one TLB entry for 2 MiB
        begin = torch.frombuffer(pages, dtype=torch.uint8).data_ptr() // PAGE_BYTES
        front = (next(_turns) - begin) % _STARTS * PAGE_BYTES
    storage = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=front)
    # The first write faults the pages in, which is slow: share it among torch's threads.
    storage.fill_(0)
    if torch.cuda.is_available():
        pages.lock(storage.data_ptr(), nbytes)
    return storage
