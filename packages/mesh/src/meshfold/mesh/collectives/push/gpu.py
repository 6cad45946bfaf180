"""The transport of GPUs that reach each other's memory: symmetric memory, copy engines, and waits of streams on flags.

A block is copied by ``cudaMemcpyAsync`` into the mapped memory of its target, which a copy engine does: no multiprocessor
takes part. The flag behind it is a ``cuStreamWriteValue32`` on the same stream, which orders it after the copy, and the
reader's stream waits by ``cuStreamWaitValue32``: no kernel spins. NVLink multicast is neither used nor prepared.

A flag that never comes keeps the reader's stream waiting, not its host: the watchdog sees that the call's event is not
reached, and says which rank has not come (:mod:`meshfold.mesh.watchdog.monitor`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from meshfold.mesh.collectives.push import epochs
from meshfold.mesh.collectives.push.transport import FLAG_BYTES
from meshfold.mesh.group import Group

_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: compares the distance, so that flags may wrap around
_PROBE_S = 20.0


class _Driver:
    """The two calls of the CUDA driver that torch has no function for, or has in some versions only."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._wait, self._write = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        for function in (self._wait, self._write):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
            function.restype = ctypes.c_int

    def wait(self, stream: int, address: int, value: int) -> None:
        """Let a stream wait until the word at an address is at ``value`` or beyond."""
        _check("cuStreamWaitValue32", self._wait(stream, address, value, _GEQ))

    def write(self, stream: int, address: int, value: int) -> None:
        """Write a word after all that the stream has done before, visible to all devices in this order."""
        _check("cuStreamWriteValue32", self._write(stream, address, value, 0))


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name} failed with CUresult {code}")


@functools.cache
def _driver() -> _Driver:
    return _Driver()


class GpuTransport:
    """Symmetric memory of a group's GPUs, and two streams beside the current one."""

    def __init__(self, group: Group, slot_bytes: int, device: torch.device) -> None:
        """Args:
        group: whose GPUs reach each other; all of its ranks must call.
        slot_bytes: bytes of each slot.
        device: of this rank.

        Raises:
            RuntimeError: if symmetric memory cannot be had, or a peer's writes do not arrive.
        """
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read when memory is mapped
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")  # private, so untyped

        self.index, self.size, self.slot_bytes, self._device = group.index, group.size, slot_bytes, device
        self._start = epochs.SLOTS * slot_bytes
        length = self._start + FLAG_BYTES
        with torch.cuda.device(device):
            self._own = symmetric.empty(length, dtype=torch.uint8, device=device)
            self._own.zero_()
            torch.cuda.synchronize(device)  # before any peer can write here: mapping waits for all of them
            handle: Any = symmetric.rendezvous(self._own, group.name)
            if (handle.rank, handle.world_size) != (group.index, group.size):
                raise RuntimeError(
                    f"symmetric memory counts this rank as {handle.rank} of {handle.world_size}, the group as "
                    f"{group.index} of {group.size}"
                )
            self._handle = handle  # owns the mapping
            self._memory: list[Tensor] = [
                self._own if rank == self.index else handle.get_buffer(rank, (length,), torch.uint8)
                for rank in range(self.size)
            ]
            self._addresses = [memory.data_ptr() + self._start for memory in self._memory]
            self._streams = {name: torch.cuda.Stream(device, priority=-1) for name in ("send", "receive")}
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
        return self._memory[rank][slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def raise_flag(self, rank: int, place: int, number: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.write(stream, self._addresses[rank] + 4 * place, epochs.word(number))

    def await_flag(self, place: int, number: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.wait(stream, self._addresses[self.index] + 4 * place, epochs.word(number))

    @contextmanager
    def beside(self, stream: Literal["send", "receive"]) -> Iterator[None]:
        side = self._streams[stream]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            yield

    def mark(self) -> torch.cuda.Event:
        point: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return point

    def after(self, point: torch.cuda.Event | None) -> None:
        if point is not None:
            torch.cuda.current_stream(self._device).wait_event(point)


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
