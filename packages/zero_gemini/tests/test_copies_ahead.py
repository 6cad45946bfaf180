"""Copies from the host begin several units ahead where units are shorter than their chunk's copy, and steps stay the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import SpecError
from meshfold.zero_gemini import ChunkPlacement, Gemini
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.planner import REGIMES, ChunkCost, DoesNotFit, GiB, Limits, Plan, Workload, plan, recost
from meshfold.zero_gemini.planner.copies_ahead import seconds_waited, with_copies_ahead
from meshfold.zero_gemini.planner.options import SPECULATIVE_STEP
from meshfold.zero_gemini.planner.policies import automatic, evaluate_placement

sys.path.append(str(Path(__file__).parent))
from planner_cases import EMULATED
from planner_events import seconds_by_events
from training_cases import in_chunks

LONG, SHORT, MIDDLE = 0.05, 0.001, 6
ELEMS = 4_000_000
"""Copied in 4 ms: as long as four units of the middle."""
MACHINE = replace(EMULATED, cpu_optimizer={}, gpu_bytes=GiB, host_bytes=GiB, host_memory=200e9)


def u_net(**changes: object) -> Workload:
    """Return a step of units with a chunk each: long ones at the ends, short ones in the middle."""
    units = (LONG, LONG, *[SHORT] * MIDDLE, LONG)
    last = 2 * len(units) - 1
    chunks = [
        ChunkCost(
            name=str(t),
            elems=ELEMS,
            gathered_elems=ELEMS,
            forward=(t, t),
            backward=(last - t, last - t),
            forward_seconds=units[t],
            backward_seconds=2 * units[t],
        )
        for t in range(len(units))
    ]
    made = Workload(
        name="u",
        chunks=tuple(chunks),
        non_model_bytes=(1000,) * (2 * len(units)),
        forward_timesteps=len(units),
        tokens=1,
        regime=REGIMES["A"],
        clipping=True,
        clip_probability=0.0,
        strategies=(SPECULATIVE_STEP,),
        timestep_seconds=(*units, *(2 * s for s in reversed(units))),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


MIDDLES = tuple(str(t) for t in range(2, 2 + MIDDLE))


def placed(workload: Workload, limits: Limits, on_host: Sequence[str] = MIDDLES) -> Plan:
    places = {c.name: ("host", "host") if c.name in on_host else ("gpu", "gpu") for c in workload.chunks}
    return evaluate_placement(workload, MACHINE, limits, placements=places, policy="given")


def in_the_same_places(made: Plan) -> Plan:
    """Return the plan by time, if the chunks stay where they are."""

    def planned(workload: Workload, machine: object, limits: Limits) -> Plan | None:
        other = recost(made, workload, made.machine)
        return other if other.peak_gpu_bytes <= (limits.gpu_bytes or 0) else None

    return with_copies_ahead(made, planned)


def test_copies_begin_several_units_ahead_where_these_are_short_and_a_step_takes_less() -> None:
    made = placed(u_net(), Limits(gpu_bytes=GiB, disk_bytes=0))
    assert made.seconds == pytest.approx(seconds_by_events(made), rel=1e-3)
    found = in_the_same_places(made)
    ready = found.workload.ready
    assert ready is not None and made.workload.ready is None
    assert [t - begin for t, begin in enumerate(ready[:9])] == [0, 1, 1, 2, 3, 4, 5, 6, 7]  # the second unit is long
    assert seconds_waited(found, ready) == 0.0 < 0.02 < seconds_waited(made, None)
    saved = seconds_by_events(made) - seconds_by_events(found)
    assert saved == pytest.approx(seconds_waited(made, None), rel=0.1)
    assert found.seconds == pytest.approx(seconds_by_events(found), rel=1e-3)
    assert found.peak_gpu_bytes > made.peak_gpu_bytes  # chunks on their way take memory


def test_no_more_is_on_its_way_than_there_is_room_for() -> None:
    roomy = placed(u_net(), Limits(gpu_bytes=GiB, disk_bytes=0))
    by_time = in_the_same_places(roomy)
    for limit in (by_time.peak_gpu_bytes, by_time.peak_gpu_bytes - 1, roomy.peak_gpu_bytes):
        limits = Limits(gpu_bytes=limit, disk_bytes=0)
        found = in_the_same_places(placed(u_net(), limits))
        assert found.peak_gpu_bytes <= limit
        assert (found.workload.ready == by_time.workload.ready) == (limit == by_time.peak_gpu_bytes)
    assert found.workload.ready is None  # nothing is left for a shorter lead either


def test_plan_looks_for_it_and_stays_within_the_limit() -> None:
    for limit in (80, 120, 200):
        limits = Limits(gpu_bytes=limit * 10**6, disk_bytes=0)
        found, by_count = plan(u_net(), MACHINE, limits), plan(u_net(in_order=False), MACHINE, limits)
        assert found.workload.ready is not None and by_count.workload.ready is None
        assert found.peak_gpu_bytes <= limit * 10**6
        for made in (found, by_count):
            assert made.seconds == pytest.approx(seconds_by_events(made), rel=1e-3)
        assert found.seconds < 0.97 * by_count.seconds


def test_a_plan_made_again_decides_it_anew() -> None:
    """Its workload has the last plan's table. With less memory left, or longer units, no table may be better."""
    roomy = plan(u_net(), MACHINE, Limits(gpu_bytes=200 * 10**6, disk_bytes=0))
    assert roomy.workload.ready is not None
    tight = Limits(gpu_bytes=min_bytes(), disk_bytes=0)
    for policy in (plan, automatic):
        again, first = policy(roomy.workload, MACHINE, tight), policy(u_net(), MACHINE, tight)
        assert (again.workload, again.seconds) == (first.workload, first.seconds)
    slow = replace(roomy.workload, timestep_seconds=(LONG,) * 18)
    assert plan(slow, MACHINE, roomy.limits).workload.ready is None


def min_bytes() -> int:
    """Return the least bytes of the device with which any plan fits."""
    with pytest.raises(DoesNotFit) as refused:
        plan(u_net(), MACHINE, Limits(gpu_bytes=10**6, disk_bytes=0))
    assert refused.value.minimum_gpu_bytes is not None
    return refused.value.minimum_gpu_bytes


@pytest.mark.parametrize("changes", [dict(in_order=False), dict(timestep_seconds=None), dict(stage=2)])
def test_by_count_where_seconds_or_order_are_not_known(changes: dict[str, object]) -> None:
    assert plan(u_net(**changes), MACHINE, Limits(gpu_bytes=400 * 10**6, disk_bytes=0)).workload.ready is None


def test_by_count_where_units_hide_their_copies() -> None:
    work = u_net(timestep_seconds=(LONG,) * 18)
    made = placed(work, Limits(gpu_bytes=GiB, disk_bytes=0))
    assert seconds_waited(made, None) == 0.0 and in_the_same_places(made) is made


def test_a_table_that_cannot_be_is_refused() -> None:
    for ready in ((0,) * 17, (0,) * 17 + (18,), (0, 1, 0) + (2,) * 15):
        with pytest.raises(SpecError, match="give a timestep for each of the 18, none later"):
            u_net(ready=ready)


class Row(nn.Module):
    def __init__(self, layers: int = 6, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.skips = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[self.skips :]:
            x = torch.tanh(block(x))
        return x.square().mean()


def step(model: Row, gemini: Gemini) -> float:
    gemini.begin(last=True)
    loss = model(torch.ones(2, 32))
    loss.backward()
    gemini.clip(1.0)
    gemini.step()
    return float(loss.detach())


def test_units_are_gathered_as_far_ahead_as_the_plan_says_in_steps_of_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = ChunkPlacement(parameters="host", state="host")
    losses, held = [], []
    enter = Chunk.wait

    def wait(chunk: Chunk) -> None:
        enter(chunk)
        held.append({number for number, other in enumerate(gemini.chunks) if other.is_gathered})

    for ahead in (False, True):
        torch.manual_seed(0)
        model = Row()
        gemini = in_chunks(model, torch.float32, lambda sizes: [host] * len(sizes), chunk_elems=32 * 33)
        assert len(gemini.chunks) == 6
        found = [step(model, gemini)]
        if ahead:
            ready = (0, 0, 0, 0, 1, 4, 5, 5, 5, 5, 9, 10)
            gemini.gather_by(names(model), ready)
            step_of = [{n for n, t in places() if ready[t] <= at <= t} for at in range(12)]
        found.append(step(model, gemini))
        if ahead:
            gemini.flush()  # steps that are pending are not waited for ahead
            monkeypatch.setattr(Chunk, "wait", wait)
        found.append(step(model, gemini))
        if ahead:
            monkeypatch.undo()
            assert changes(held) == changes(step_of)
        model.skips = 2
        found += [step(model, gemini) for _ in range(3)]  # in another order
        losses.append(found)
        gemini.close()
    assert losses[0] == losses[1]


def changes(sets: list[set[int]]) -> list[set[int]]:
    """Leave out what is as before."""
    return [now for i, now in enumerate(sets) if i == 0 or now != sets[i - 1]]


def names(model: Row) -> list[str]:
    """Return the units of a step in order."""
    forward = [f"blocks.{n}" for n in range(len(model.blocks))]
    return [*forward, *reversed(forward)]


def places() -> list[tuple[int, int]]:
    """Return pairs of a chunk and a timestep that uses it."""
    return [(n, t) for n in range(6) for t in (n, 11 - n)]
