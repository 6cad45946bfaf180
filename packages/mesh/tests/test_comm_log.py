"""The recorder: every collective once, with the bytes of the table in ``meshfold.mesh.recording.comm_log``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from meshfold.mesh import (
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    exchange_rows,
    moved_bytes,
    record,
    reduce_scatter,
    send,
    shift,
)
from meshfold.mesh.collectives import primitives
from meshfold.mesh.recording.comm_log import KINDS
from meshfold.mesh.testing import fake_world


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with fake_world(12, rank=7):
        yield Mesh({"depth": 3, "row": 1, "col": 4})


def test_bytes_by_kind(mesh: Mesh) -> None:
    group, x = mesh.group("col"), torch.ones(4, 6)  # 96 bytes
    with record() as log:
        all_gather(x, group, 1)
        reduce_scatter(x, group, 0)
        all_reduce(x, group)
        all_to_all(x, group, 0, 1)
        exchange_rows(x, group, (0, 1, 2, 1), (3, 0, 5, 1)).wait()  # rank 7 is the last of its group
        broadcast(x, group, 2)
        shift(x, group)
        send(x, group, 1).wait()
    assert [(entry.kind, entry.block_bytes, entry.bytes) for entry in log.entries] == [
        ("all_gather", 384, 288),
        ("reduce_scatter", 96, 72),
        ("all_reduce", 96, 144),
        ("all_to_all", 96, 72),
        ("exchange_rows", 72, 72),
        ("broadcast", 96, 96),
        ("shift", 96, 96),
        ("send", 96, 96),
    ]
    assert {entry.axes for entry in log.entries} == {("col",)} and {e.group_size for e in log.entries} == {4}
    assert {entry.kind for entry in log.entries} == set(KINDS)
    assert log.bytes == 936


def test_fractions_are_exact() -> None:
    assert moved_bytes("all_reduce", 10, 3) == Fraction(40, 3)
    assert moved_bytes("all_gather", 7, 7) == 6
    assert [moved_bytes(kind, 100, 1) for kind in KINDS] == [0] * 8


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.int64, 8), (torch.uint8, 1)],
)
def test_bytes_come_from_the_tensors(mesh: Mesh, dtype: torch.dtype, size: int) -> None:
    with record() as log:
        broadcast(torch.zeros(3, 5, dtype=dtype), mesh.group("col"), 0)
    assert log.bytes == 15 * size


def test_axes_are_in_mesh_order_without_those_of_size_one(mesh: Mesh) -> None:
    with record() as log:
        all_reduce(torch.ones(2), mesh.group("col", "row", "depth"))
        all_reduce(torch.ones(2), mesh.group("col%2"))
    assert [(entry.axes, entry.group_size) for entry in log.entries] == [
        (("depth", "col"), 12),
        (("col%2",), 2),
    ]


def test_what_does_not_travel_is_not_recorded(mesh: Mesh) -> None:
    with record() as log:
        all_reduce(torch.ones(2), mesh.group("row"))
        all_gather(torch.ones(2), mesh.group("missing"))
        shift(torch.ones(2), mesh.group("col"), 4)
    assert log.entries == [] and log.bytes == 0


def test_a_pending_collective_is_recorded_when_it_is_issued(mesh: Mesh) -> None:
    with record() as log:
        pending = all_reduce(torch.ones(2), mesh.group("col"), async_op=True)
    assert len(log.entries) == 1
    with record() as later:
        pending.wait()
        pending.wait()
    assert later.entries == []


def test_phases_and_backward(mesh: Mesh) -> None:
    x = torch.ones(4, requires_grad=True)
    with record() as log:
        y = primitives.gather(x, mesh, 0, ("depth", "col"))
        log.phase = "backward"
        y.sum().backward()
    forward, backward = (
        [(e.kind, e.axes, e.bytes) for e in log.entries if e.phase == p] for p in ("forward", "backward")
    )
    assert forward == [("all_gather", ("col",), 48), ("all_gather", ("depth",), 128)]
    assert backward == [("reduce_scatter", ("depth",), 128), ("reduce_scatter", ("col",), 48)]
    assert log.count("forward") == Counter(forward) and log.count() == Counter(forward + backward)


def test_nested_recordings_each_see_their_own_time(mesh: Mesh) -> None:
    x, group = torch.ones(2), mesh.group("col")
    with record() as outer:
        with record() as inner:
            all_reduce(x, group)
        broadcast(x, group, 0)
    shift(x, group)
    assert [entry.kind for entry in inner.entries] == ["all_reduce"]
    assert [entry.kind for entry in outer.entries] == ["all_reduce", "broadcast"]


def test_nested_recordings_that_are_alike_end_in_the_right_order(mesh: Mesh) -> None:
    with record() as outer:
        with record() as inner:
            pass
        all_reduce(torch.ones(2), mesh.group("col"))
    assert inner.entries == [] and len(outer.entries) == 1


def test_an_error_ends_the_recording(mesh: Mesh) -> None:
    with pytest.raises(RuntimeError, match="stop"), record() as log:
        raise RuntimeError("stop")
    all_reduce(torch.ones(2), mesh.group("col"))
    assert log.entries == []


def test_sums_by_field_and_the_table(mesh: Mesh) -> None:
    with record() as log:
        for _ in range(2):
            all_reduce(torch.ones(2), mesh.group("col"))
        broadcast(torch.ones(2), mesh.group("depth"), 0)
    assert log.bytes_by("kind", "axes") == {("all_reduce", ("col",)): 24, ("broadcast", ("depth",)): 8}
    assert log.bytes_by("phase") == {("forward",): 32}
    title, *lines = str(log).splitlines()
    assert title.split() == ["phase", "collective", "axes", "ranks", "calls", "bytes", "a", "rank", "sends"]
    assert [line.split() for line in lines] == [
        ["forward", "all_reduce", "col", "4", "2", "24"],
        ["forward", "broadcast", "depth", "3", "1", "8"],
    ]
