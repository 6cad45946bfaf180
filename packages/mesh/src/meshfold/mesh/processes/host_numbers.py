"""Numbers that the hosts of ranks exchange without waiting for their devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

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
