"""Tools of the numba kernels: compilation by one process per machine, torch's number of threads, non-temporal stores.

A compiled kernel is cached in a folder next to the source, where the next process finds it. But the ranks of a job reach their
first step together: without a lock each would compile the same kernels, for seconds on every core.

A core that writes to memory reads the cache line first, unless the store is non-temporal. A pass that reads 14 bytes per
element and writes 12 others then moves 26 instead of 38.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from meshfold.kernels.random_bits import GOLDEN, MIX_1, MIX_2

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def one_process_compiles(kernel: Any) -> Any:
    """Wrap a kernel of ``njit(cache=True)``: it waits while another process compiles it, and uses the result.

    If a file cannot be locked, each process compiles for itself, as with plain numba.
    """
    compile_now = kernel.compile

    def compile_in_turn(signature: Any) -> Any:
        # Take Numba's lock first: other threads hold it when they reach a kernel that is called by a kernel.
        with global_compiler_lock, _compiling(kernel):
            return compile_now(signature)

    kernel.compile = compile_in_turn
    return kernel


inner = partial(njit, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""``njit`` for functions that only kernels call: entries for Python and C would take a fifth of the time of compilation."""


@contextmanager
def _compiling(kernel: Any) -> Iterator[None]:
    """Hold the kernel's lock, which all processes of the machine share. The system releases it when a process ends."""
    descriptor = _lock(os.path.join(kernel.stats.cache_path, f"{kernel.__module__}.{kernel.__qualname__}.lock"))
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: str) -> int | None:
    """Return the open file that holds a lock; None if the system has no locks or the folder belongs to another user."""
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except (ImportError, OSError):
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)  # not flock(), which a forked process would hold too
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


_one_at_a_time = threading.Lock()


@contextmanager
def torch_threads() -> Iterator[None]:
    """Context manager: kernels inside use torch's number of threads, so one setting controls both.

    Blocks do not nest. Kernels of several threads run in parallel if numba's threading layer allows it, otherwise one after the
    other.
    """
    wanted = torch.get_num_threads()
    before = numba.get_num_threads()
    if torch.get_num_threads() != wanted:  # numba has just started its threads and changed OpenMP's number
        torch.set_num_threads(wanted)
    numba.set_num_threads(min(wanted, numba.config.NUMBA_NUM_THREADS))
    try:
        with _queue():
            yield
    finally:
        numba.set_num_threads(before)


def _queue() -> AbstractContextManager[Any]:
    """Return a lock if numba uses its own work queue (without OpenMP and TBB), which crashes on concurrent use."""
    return _one_at_a_time if numba.threading_layer() == "workqueue" else nullcontext()


LINE = 64
"""Bytes that are written at a time."""


@intrinsic
def _write_line(typingctx: Any, target: Any, at: Any, source: Any, of: Any) -> Any:
    """Copy 64 bytes of an array from element ``of`` to another at element ``at``, whose address is a multiple of 64."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()

        def place(number: int) -> Any:
            array = context.make_array(signature.args[number])(context, builder, arguments[number])
            return builder.bitcast(builder.gep(array.data, [arguments[number + 1]], inbounds=True), line)

        value = builder.load(place(2))
        value.align = 1
        written = builder.store(value, place(0))
        written.align = LINE
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        written.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(target, at, source, of), codegen


@intrinsic
def _address(typingctx: Any, array: Any) -> Any:
    """Return the address of an array, as ``ctypes.data`` does, which costs as much as a thousand elements."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), codegen


@intrinsic
def written_out(typingctx: Any) -> Any:
    """Store fence: other threads see non-temporal stores before later writes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@inner()
def stream(target: Any, at: int, source: Any, count: int) -> None:
    """Copy the first elements of a flat array to another of the same dtype, from ``at`` on.

    ``written_out`` must follow before another thread reads. No views: creating one of memory shared between threads costs as much
    as copying hundreds of elements.
    """
    each = LINE // target.itemsize
    ahead = (-(_address(target) + at * target.itemsize) % LINE) // target.itemsize  # before the first whole line
    begin = min(ahead, count)
    for i in range(begin):
        target[at + i] = source[i]
    end = begin + (count - begin) // each * each
    for i in range(begin, end, each):
        _write_line(target, at + i, source, i)
    for i in range(end, count):
        target[at + i] = source[i]


@njit(inline="always")
def bits_at(state: Any, index: Any) -> Any:
    """Return the bits ``splitmix64(state + index * GOLDEN)``, all uint64."""
    z = state + index * _GOLDEN + _GOLDEN
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)
