"""Numba compiles a kernel once on a machine, however many processes want it at the same moment. Imports numba when called.

What one process has compiled lies in a folder beside the source, where the next one finds it. But the ranks of a job come to
their first step together: without waiting for each other each would compile the same kernels, for seconds on every core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def one_process_compiles(kernel: Any) -> Any:
    """A kernel of ``njit(cache=True)`` that waits while another process compiles it, and takes what that has made.

    Where a file cannot be locked each process compiles for itself, as with numba alone.
    """
    from numba.core.compiler_lock import global_compiler_lock

    compile_now = kernel.compile

    def compile_in_turn(signature: Any) -> Any:
        # Numba's lock first, as its other threads have it when they come to a kernel that a kernel calls.
        with global_compiler_lock, _turn(kernel):
            return compile_now(signature)

    kernel.compile = compile_in_turn
    return kernel


@contextmanager
def _turn(kernel: Any) -> Iterator[None]:
    """Hold the kernel's lock among the processes of the machine. It goes with a process that ends."""
    descriptor = _lock(
        os.path.join(kernel.stats.cache_path, f"{kernel.__module__}.{kernel.__qualname__}.lock")
    )
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: str) -> int | None:
    """The open file that holds a lock; None where there are no locks: another system, or a folder of others."""
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except (ImportError, OSError):
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)  # and not flock(): a forked process would hold that too
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
