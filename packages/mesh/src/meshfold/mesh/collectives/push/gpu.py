"""The transport of GPUs that reach each other's memory: symmetric memory, copy engines, and waits of streams on flags.

A block is copied by ``cuMemcpyAsync`` into the mapped memory of its target, which a copy engine does: no multiprocessor takes part.
The flag after it is a ``cuStreamWriteValue32`` on the same stream, which orders it after the copy. The reader's stream waits by
``cuStreamWaitValue32``: no kernel spins. NVLink multicast is neither used nor prepared.

A flag that never comes keeps the reader's stream waiting, not its host. The watchdog sees that the call's event is not reached, and
names the missing rank (:mod:`meshfold.mesh.watchdog.monitor`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh.collectives.push import epochs
from meshfold.mesh.collectives.push.transport import FLAG_BYTES, STREAMS, Stream
from meshfold.mesh.group import Group

_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: compares the distance, so that flags may wrap around
_PROBE_S = 20.0
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class _Driver:
    """The calls of the CUDA driver that torch has no function for, or one that takes many times as long to start."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, size, word, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint
        self._wait = _declared(library.cuStreamWaitValue32_v2, pointer, ctypes.c_uint64, word, flags)
        self._write = _declared(library.cuStreamWriteValue32_v2, pointer, ctypes.c_uint64, word, flags)
        self._copy = _declared(library.cuMemcpyAsync, ctypes.c_uint64, ctypes.c_uint64, size, pointer)

    def wait(self, stream: int, address: int, value: int) -> None:
        """Let a stream wait until the word at an address is at ``value`` or beyond."""
        if code := self._wait(stream, address, value, _GEQ):
            raise _failure("cuStreamWaitValue32", code)

    def write(self, stream: int, address: int, value: int) -> None:
        """Write a word after all that the stream has done before, visible to all devices in this order."""
        if code := self._write(stream, address, value, 0):
            raise _failure("cuStreamWriteValue32", code)

    def copy(self, stream: int, target: int, source: int, length: int) -> None:
        """Copy bytes between addresses of any GPUs."""
        if length and (code := self._copy(target, source, length, stream)):
            raise _failure("cuMemcpyAsync", code)


def _declared(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def _failure(name: str, code: int) -> RuntimeError:
    return RuntimeError(f"{name} failed with CUresult {code}")


@functools.cache
def _driver() -> _Driver:
    return _Driver()


class GpuTransport:
    """Symmetric memory of a group's GPUs, and two streams in addition to the current one."""

    def __init__(self, group: Group, slot_bytes: int, device: torch.device) -> None:
        """Args:
        group: whose GPUs reach each other; all of its ranks must call.
        slot_bytes: bytes of each slot.
        device: of this rank.

        Raises:
            RuntimeError: if symmetric memory cannot be had, or a peer's writes do not arrive.
        """
        self.index, self.size, self.slot_bytes, self._device = group.index, group.size, slot_bytes, device
        self._start = epochs.SLOTS * slot_bytes
        length = self._start + FLAG_BYTES
        with torch.cuda.device(device):
            whole, self._handle = map_memory(group, length, device)
            self._own = whole[self.index]
            self._slots = [[one[slot * slot_bytes :][:slot_bytes] for slot in range(epochs.SLOTS)] for one in whole]
            self._addresses = [one.data_ptr() for one in whole]
            self._flags = [address + self._start for address in self._addresses]
            streams = {name: torch.cuda.Stream(device, priority=-1) for name in STREAMS}
            self._on = {name: _On(self, stream) for name, stream in streams.items()}
            self._came_to = torch.cuda.Event()  # recorded and waited for at once, so one is enough
            self._side: _On | None = None  # inside of ``on``
            self._driver = _driver()
            self._probe()

    def _probe(self) -> None:
        """Raise every peer's probe flag by the stream, and look for theirs from the host.

        Raises:
            RuntimeError: if one does not arrive: nothing may wait on a stream then.
        """
        # Behind the flags of calls: places 2·size to 3·size.
        for rank in range(self.size):
            self.raise_flag(rank, 2 * self.size + self.index, 1)
        end = time.monotonic() + _PROBE_S
        while True:
            torch.cuda.current_stream(self._device).synchronize()
            flags = self._own[self._start :].view(torch.int32)[2 * self.size : 3 * self.size].tolist()
            if all(flags):
                return
            if time.monotonic() > end:
                late = [rank for rank, flag in enumerate(flags) if not flag]
                raise RuntimeError(f"a flag of the ranks {late} of the group did not arrive in {_PROBE_S:.0f} s")
            time.sleep(0.001)

    def memory(self, rank: int, slot: int) -> Tensor:
        return self._slots[rank][slot]

    def handle(self) -> int:
        if self._side is not None:
            return self._side.handle
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def write(self, rank: int, slot: int, start: int, block: Tensor, first: int, length: int) -> None:
        target = self._addresses[rank] + slot * self.slot_bytes + start
        self._driver.copy(self.handle(), target, block.data_ptr() + first, length)

    def read(self, slot: int, start: int, out: Tensor, first: int, length: int) -> None:
        source = self._addresses[self.index] + slot * self.slot_bytes + start
        self._driver.copy(self.handle(), out.data_ptr() + first, source, length)

    def copy(self, block: Tensor, out: Tensor, first: int) -> None:
        length = block.numel() * block.element_size()
        self._driver.copy(self.handle(), out.data_ptr() + first, block.data_ptr(), length)

    def raise_flag(self, rank: int, place: int, number: int) -> None:
        self._driver.write(self.handle(), self._flags[rank] + 4 * place, epochs.word(number))

    def await_flag(self, place: int, number: int) -> None:
        self._driver.wait(self.handle(), self._flags[self.index] + 4 * place, epochs.word(number))

    def follow(self, *streams: Stream) -> None:
        # By torch: it makes the device's context that of this thread, which the driver's calls need.
        self._came_to.record(torch.cuda.current_stream(self._device))
        for stream in streams:
            self._on[stream].stream.wait_event(self._came_to)

    def on(self, stream: Stream) -> _On:
        return self._on[stream]

    def mark(self) -> torch.cuda.Event:
        point = torch.cuda.Event()
        point.record(self._stream())
        return point

    def after(self, point: torch.cuda.Event | None) -> None:
        if point is not None:
            self._stream().wait_event(point)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._side is None else self._side.stream


class _On:
    """Context manager: a transport's operations, not torch's, go to a stream. Switching torch's takes much longer.

    Attributes:
        stream: that they go to.
        handle: of it, for the driver.
    """

    __slots__ = ("_transport", "handle", "stream")

    def __init__(self, transport: GpuTransport, stream: torch.cuda.Stream) -> None:
        self._transport, self.stream, self.handle = transport, stream, int(stream.cuda_stream)

    def __enter__(self) -> None:
        self._transport._side = self

    def __exit__(self, *error: object) -> None:
        self._transport._side = None


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Map memory inside without NVLink multicast: torch reads the variable when memory is mapped."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def map_memory(group: Group, length: int, device: torch.device) -> tuple[list[Tensor], Any]:
    """Return bytes of every GPU of a group, zeros, as this rank sees them, and the owner of the mapping; all ranks must call.

    Raises:
        RuntimeError: if symmetric memory cannot be had.
    """
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")  # private, so untyped
    with _without_multicast():
        own: Tensor = symmetric.empty(length, dtype=torch.uint8, device=device)
        own.zero_()
        torch.cuda.synchronize(device)  # before any peer can write here: mapping waits for all of them
        handle: Any = symmetric.rendezvous(own, group.name)
    if (handle.rank, handle.world_size) != (group.index, group.size):
        raise RuntimeError(
            f"symmetric memory counts this rank as {handle.rank} of {handle.world_size}, the group as "
            f"{group.index} of {group.size}"
        )
    ranks = range(group.size)
    return [own if rank == group.index else handle.get_buffer(rank, (length,), torch.uint8) for rank in ranks], handle


def missing(numbers: list[int], device: torch.device) -> str:
    """Return why the GPUs of one machine cannot push to each other; empty if nothing is known against it.

    Args:
        numbers: of the ranks' GPUs, each as its own process counts them.
        device: of this rank.
    """
    here, visible = device.index or 0, torch.cuda.device_count()
    if len(set(numbers)) < len(numbers) and visible > 1:
        return "several ranks use the same GPU"
    for peer in set(numbers) - {here}:
        # With one visible GPU a rank, all of them have number 0, and the probe decides.
        if peer < visible and not torch.cuda.can_device_access_peer(here, peer):
            return f"GPU {here} does not reach the memory of GPU {peer}"
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver has no waits of streams on memory ({error})"
    return ""
