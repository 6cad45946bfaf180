"""Numbers that hosts exchange, or read from their devices, without waiting for these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.mesh.group import Group
from meshfold.mesh.processes import groups
from meshfold.mesh.recording import comm_log, flight_recorder


def start_largest(number: int, group: Group) -> Callable[[], int]:
    """Start finding the maximum over a group's ranks; calling the result waits for the other hosts, but for no device.

    All ranks of the group must call. The message is one of 8 bytes over gloo; work in between hides its latency. Simulated ranks
    have the same numbers.

    Args:
        number: of this rank, a whole one.
        group: the ranks.
    """
    if group.size == 1:
        return lambda: number
    if comm_log._active:
        comm_log.note("all_reduce", group.axes, group.size, 8)
    if groups.is_simulated():
        return lambda: number
    handle = groups.host_group(group.ranks)
    said = torch.tensor([number], dtype=torch.int64, device="cpu")
    call = None
    if flight_recorder.active is not None:
        told = replace(group, name=groups.group_name(handle))
        call = flight_recorder.active.enter("all_reduce", told, said, "max", None, now=False)
    work = dist.all_reduce(said, dist.ReduceOp.MAX, group=handle, async_op=True)

    def finish() -> int:
        if call is None:
            work.wait()
        else:
            with call:
                work.wait()
        return int(said)

    return finish


def start_reading(number: Tensor) -> Callable[[], int | None]:
    """Start copying a device's number to the host; calling the result returns it, or None as long as it is not there.

    Nothing ever waits. In the capture of a CUDA graph it is never there.

    Args:
        number: [1], whole; not to be changed before it is read.
    """
    if not number.is_cuda:
        return lambda: int(number)
    if torch.cuda.is_current_stream_capturing():
        return lambda: None
    host = torch.empty(1, dtype=number.dtype, pin_memory=True)
    host.copy_(number, non_blocking=True)
    there = torch.cuda.Event()
    there.record()
    return lambda: int(host) if there.query() else None


def start_copying(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Start copying tensors of one device to the host; calling the result waits for these copies alone, and returns them.

    What the device computes behind them may change the tensors.
    """
    found = [tensor.to("cpu", copy=True, non_blocking=True) for tensor in tensors]  # from a GPU into pinned memory
    if not tensors[0].is_cuda:
        return lambda: found
    there = torch.cuda.Event()
    there.record()

    def finish() -> list[Tensor]:
        there.synchronize()
        return found

    return finish
