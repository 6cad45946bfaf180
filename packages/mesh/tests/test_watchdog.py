"""The watchdog: what does not finish ends on every rank, with one message that names the call and who did not come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.mesh import CollectiveError, LaunchError, Mesh, all_gather, all_reduce, receive, send
from meshfold.mesh.group import Group
from meshfold.mesh.processes import groups
from meshfold.mesh.processes.environment import watchdog_settings
from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.recording.flight_recorder import Call, FlightRecorder
from meshfold.mesh.testing import close_pools, fake_world, ranks, run_on_ranks
from meshfold.mesh.watchdog import monitor
from meshfold.mesh.watchdog.monitor import GpuProgress, watch

LIMIT_S = 2.0


def mesh() -> Mesh:
    return Mesh(dict(data=2, tensor=2))


def some_steps(mesh: Mesh) -> None:
    for step in range(3):
        flight_recorder.at_step(step)
        for axis in ("tensor", "data"):
            all_reduce(torch.ones(3), mesh.group(axis))


def late_for_its_data(mesh: Mesh) -> None:
    """Where rank 3 is while the others wait for it, until they have found it."""
    while monitor._running[1]._diagnosis.agreed() is None:  # type: ignore[index]
        time.sleep(0.05)


def one_comes_late(what: str) -> str:
    here = mesh()
    some_steps(here)  # makes its groups, for which a busy machine may take longer
    watch(LIMIT_S)
    some_steps(here)
    try:
        if here.rank == 3:
            late_for_its_data(here)
        if what == "receive":
            other = here.group("data").index ^ 1
            if here.rank in (0, 1):
                receive(torch.empty(5), here.group("data"), other).wait()
            else:
                send(torch.ones(5), here.group("data"), other).wait()
        if what == "everyone":
            all_reduce(torch.ones(4, 2), here.group("data", "tensor"))
        all_reduce(torch.ones(4, 2), here.group("tensor"))
        all_reduce(torch.ones(7), here.group("data"))
    except CollectiveError as error:
        return str(error)
    return "no error"


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["everyone", "all_reduce", pytest.param("receive", marks=pytest.mark.slow)])
def test_the_rank_that_did_not_come_is_named_on_every_rank(what: str) -> None:
    began = time.monotonic()
    try:
        found = run_on_ranks(4, one_comes_late, what)
    finally:
        close_pools()  # its connections are broken now
    assert time.monotonic() - began < 110
    # Rank 3 comes when the others have gone: it gets the same message, or that of a broken connection with it.
    verdicts = {text.partition("\n(Rank")[0] for text in found}
    assert len(verdicts) == 1, found
    [verdict] = verdicts
    assert "in step 2, number " in verdict and "did not finish in 2 s" in verdict
    culprit = next(line for line in verdict.splitlines() if line.startswith("  rank 3: "))
    assert "in late_for_its_data" in culprit and "test_watchdog.py:" in culprit
    assert "its last collective was all_reduce of (3,) float32 over data (ranks 1, 3)" in culprit
    assert "watchdog=SECONDS" in verdict
    if what == "everyone":
        assert re.findall(r"^  rank (\d+)", verdict, re.MULTILINE) == ["3"]
    for rank, text in enumerate(found):
        where = "receive of (5,) float32 from rank 3" if (what, rank) == ("receive", 1) else "(ranks"
        assert where in text


@ranks(4)
def test_calls_are_counted_and_watched_only_while_somebody_watches() -> None:
    here = mesh()
    group = here.group("tensor")
    some_steps(here)
    assert flight_recorder.active is None
    first, second = watch(30.0), watch(20.0)
    active = flight_recorder.active
    assert active is not None and flight_recorder.limit is not None and flight_recorder.limit.total_seconds() == 20
    before = active.counts.get(group.name, 0)
    pending = all_gather(torch.ones(2), group, async_op=True)
    assert active.counts[group.name] == before + 1 and not active.waiting
    pending.wait()
    some_steps(here)
    assert active.counts[group.name] == before + 4
    assert str(active.last[-1]) == f"all_reduce of (3,) float32 over data (ranks {here.rank % 2}, {here.rank % 2 + 2})"
    second.close()
    second.close()
    assert flight_recorder.active is active and flight_recorder.limit == timedelta(seconds=30)
    first.close()
    assert flight_recorder.active is None and flight_recorder.limit is None


@pytest.mark.parametrize("first", [0, 1])
@ranks(2)
def test_the_newest_open_watch_limits_groups_and_the_last_one_closed_puts_their_limits_back(first: int) -> None:
    world = dist.group.WORLD
    before = groups._limit_of(world)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), world)
    try:
        watches = [watch(30.0), watch(20.0, compare=True)]
        assert groups._limit_of(world) == timedelta(seconds=20)
        watches[first].close()
        assert groups._limit_of(world) == timedelta(seconds=(20, 30)[first])
        watches[1 - first].close()
        assert groups._limit_of(world) == timedelta(seconds=77)
    finally:
        dist.distributed_c10d._set_pg_timeout(before, world)  # the ranks serve other tests


def other_shape(x: Tensor, group: Group) -> None:
    all_reduce(x if group.index else x[:2], group)


def other_dtype(x: Tensor, group: Group) -> None:
    all_gather(x if group.index else x.double(), group)


def other_kind(x: Tensor, group: Group) -> None:
    all_gather(x, group) if group.index else all_reduce(x, group)


def other_op(x: Tensor, group: Group) -> None:
    all_reduce(x, group, "sum" if group.index else "max")


def other_shape_later(x: Tensor, group: Group) -> None:
    all_reduce(x if group.index else x.double(), group, async_op=True).wait()


def other_message(x: Tensor, group: Group) -> None:
    if group.index:
        receive(torch.empty(4), group, 0).wait()
    else:
        send(x.view(2, 2), group, 1).wait()
        raise CollectiveError("the one that receives compares: (2, 2) and (4,)")


CASES: dict[str, tuple[Callable[[Tensor, Group], None], str, str]] = {
    "shape": (other_shape, "rank 0: all_reduce of (2,) float32, op sum", "rank 1: all_reduce of (4,) float32, op sum"),
    "dtype": (other_dtype, "rank 0: all_gather of (4,) float64, dim 0", "rank 1: all_gather of (4,) float32, dim 0"),
    "kind": (other_kind, "rank 0: all_reduce of (4,) float32, op sum", "rank 1: all_gather of (4,) float32, dim 0"),
    "op": (other_op, "op max", "op sum"),
    "async": (other_shape_later, "of (4,) float64", "of (4,) float32"),
    "message": (other_message, "(2, 2)", "(4,)"),
}


def differ(name: str) -> str:
    group = Mesh(dict(tensor=2)).group("tensor")
    watchdog_settings = watch(10.0, compare=True)
    try:
        for _ in range(3):
            all_reduce(torch.ones(4), group)
        CASES[name][0](torch.ones(4), group)
    except CollectiveError as error:
        return str(error)
    finally:
        watchdog_settings.close()
    return "no error"


@pytest.mark.parametrize("name", list(CASES))
def test_calls_that_differ_are_shown_before_they_run(name: str) -> None:
    try:
        first, second = run_on_ranks(2, differ, name)
    finally:
        if name in ("async", "message"):
            close_pools()  # these have run by the time they are compared
    _, *parts = CASES[name]
    for text in (first, second):
        assert all(part in text for part in parts), text
    if name != "message":
        assert first == second
        assert re.search(r"collective number \d+ over tensor \(ranks 0, 1\) is\n", first)
        assert (
            f"called at test_watchdog.py:{CASES[name][0].__code__.co_firstlineno + 1} in {CASES[name][0].__name__}"
            in first
        )


@ranks(4)
def test_comparing_lets_through_what_is_right() -> None:
    here = mesh()
    watchdog_settings = watch(10.0, compare=True)
    some_steps(here)
    both = here.group("data", "tensor")
    one, two = (
        all_reduce(torch.ones(5), both, async_op=True),
        all_gather(torch.ones(5), here.group("data"), async_op=True),
    )
    group = here.group("tensor")
    if group.index:
        received = receive(torch.empty(3), group, 0).wait()
        assert received.tolist() == [4.0, 4.0, 4.0]
    else:
        sent = send(torch.full((3,), 4.0), group, 1)
        sent.wait()
    assert two.wait().shape == (10,)
    assert one.wait().tolist() == [4.0] * 5
    watchdog_settings.close()


class Moment:
    """Stands for an event on a GPU."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


def test_a_gpu_that_comes_no_further_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events stand behind the calls; what counts is that the first that is not over stays the first."""
    from meshfold.mesh.watchdog import monitor as module

    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    recorder = FlightRecorder(None)  # type: ignore[arg-type]  # nobody looks
    progress = GpuProgress(recorder)

    def stuck() -> Call | None:
        progress.look()
        return progress.held_up_by(60.0)

    group = Group(axes=("data",), ranks=(0, 1), index=0, name="g")
    moments = [Moment() for _ in range(3)]
    calls = [Call(recorder, "all_reduce", group, torch.ones(2), "sum", None) for _ in moments]
    for call, moment in zip(calls, moments, strict=True):
        call.event = moment  # type: ignore[assignment]
        recorder.on_device.append(call)
    assert stuck() is None
    now[0] += 50
    moments[0].over = True
    assert stuck() is None  # it has come one further
    now[0] += 50
    assert stuck() is None
    now[0] += 11
    assert stuck() is calls[1]
    moments[1].over = moments[2].over = True
    assert stuck() is None and not recorder.on_device


def test_nothing_is_watched_where_nobody_communicates() -> None:
    with fake_world(8):
        watch(5.0).close()
        assert flight_recorder.active is None
    watch(5.0).close()
    assert flight_recorder.active is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (None, False)),
        ({"MESHFOLD_WATCHDOG": "90.5"}, (90.5, False)),
        ({"MESHFOLD_WATCHDOG": "0", "MESHFOLD_DEBUG": "collectives"}, (0.0, True)),
    ],
    ids=["nothing", "limit", "both"],
)
def test_what_the_environment_says(variables: dict[str, str], expected: tuple[float | None, bool]) -> None:
    assert watchdog_settings(variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MESHFOLD_WATCHDOG": "ten"}, "MESHFOLD_WATCHDOG='ten': give seconds"),
        ({"MESHFOLD_DEBUG": "all"}, "MESHFOLD_DEBUG='all': write 'collectives'"),
    ],
    ids=["limit", "debug"],
)
def test_what_the_environment_must_not_say(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        watchdog_settings(variables)


@ranks(2)
def test_watching_costs_microseconds() -> None:
    """CPU time of this thread, which other work on the machine does not add to: the least of many calls of a collective of one
    number, with and without, by turns."""
    group, x = Mesh(dict(tensor=2)).group("tensor"), torch.ones(1)

    def least() -> float:
        best = 1.0
        for _ in range(100):
            began = time.thread_time()
            all_reduce(x, group)
            best = min(best, time.thread_time() - began)
        return best

    without = with_it = 1.0
    for _ in range(4):
        without = min(without, least())
        watchdog_settings = watch(60.0)
        with_it = min(with_it, least())
        watchdog_settings.close()
    assert with_it - without < 100e-6, (without, with_it)
