"""Messages between two ranks: order, both directions at once, dtypes, and what is recorded."""

from __future__ import annotations

import torch

from meshfold.mesh import Mesh, Transfer, receive, record, send
from meshfold.mesh.testing import ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


@ranks(4)
def test_messages_arrive_in_order_and_directions_do_not_wait_for_each_other() -> None:
    mesh = Mesh({"data": 2, "pipe": 2})
    up, down = mesh.channel("up", "pipe"), mesh.channel("down", "pipe")
    group = mesh.group("pipe")
    assert up.ranks == down.ranks == group.ranks and len({up.name, down.name, group.name}) == 3
    assert mesh.channel("up", "pipe").name == up.name
    here, other = group.index, 1 - group.index
    mine, theirs = (up, down) if here == 0 else (down, up)
    # Everyone sends first, more than any buffer holds, and receives then.
    sent = [send(torch.full((300_000,), 10.0 * mesh.rank + k), mine, other) for k in range(3)]
    coming = [receive(torch.empty(300_000), theirs, other) for _ in range(3)]
    partner = mesh.rank + (1 if here == 0 else -1)
    for k, transfer in enumerate(coming):
        arrived = transfer.wait()
        assert torch.equal(arrived, torch.full((300_000,), 10.0 * partner + k))
        assert transfer.wait() is arrived and transfer.done
    for transfer in sent:
        assert isinstance(transfer, Transfer)
        transfer.wait()
        assert transfer.done


@ranks(2)
def test_dtypes_and_tensors_that_are_not_contiguous() -> None:
    mesh = Mesh({"pipe": 2})
    way = mesh.channel("up", "pipe")
    for dtype in DTYPES:
        x = torch.arange(24).view(4, 6).t().to(dtype)
        with record() as log:
            if mesh.rank == 0:
                send(x, way, 1).wait()
            else:
                assert torch.equal(receive(torch.empty(6, 4, dtype=dtype), way, 0).wait(), x)
        wanted = [("send", ("pipe",), 24 * dtype.itemsize)] if mesh.rank == 0 else []
        assert [(entry.kind, entry.axes, entry.bytes) for entry in log.entries] == wanted


@ranks(1)
def test_a_channel_of_one_rank_is_its_group() -> None:
    mesh = Mesh({"pipe": 1})
    assert mesh.channel("up", "pipe") == mesh.group("pipe")
