"""Plans of models whose compute and parameters are in different places, as a U-Net's: seconds of every timestep decide."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshfold.mesh import SpecError
from meshfold.zero_gemini.planner import REGIMES, ChunkCost, GiB, Limits, Plan, Workload, plan
from meshfold.zero_gemini.planner.loads import Loads
from meshfold.zero_gemini.planner.options import NONE, SPECULATIVE_STEP
from meshfold.zero_gemini.planner.policies import evaluate_placement
from meshfold.zero_gemini.planner.seconds import seconds_table

sys.path.append(str(Path(__file__).parent))
from planner_cases import EMULATED
from planner_events import seconds_by_events

UNITS = (0.05, 0.002, 0.001, 0.001, 0.002, 0.05)
"""Seconds of the forward of units: at the ends images are large, in the middle small."""
USERS = ((0,), (1,), (2,), (3,), (1, 5), (4,), (1, 2))
"""Units that use each chunk; one has parameters of the middle and of the end, as chunks are laid out in order of registration."""
ELEMS = 1_000_000


def u_net(*, known: bool = True, elems: int = ELEMS) -> Workload:
    """Return a step of a small U-Net. Its chunks' seconds are what `workload_of` makes of equal parts of their units."""
    half, last = len(UNITS), 2 * len(UNITS) - 1
    seconds = (*UNITS, *(2 * s for s in reversed(UNITS)))
    chunks = []
    for number, units in enumerate(USERS):
        forward = sum(UNITS[unit] / sum(unit in other for other in USERS) for unit in units)
        runs = ((units[0], units[-1]), (last - units[-1], last - units[0]))
        visits = sorted([*units, *(last - unit for unit in units)])
        chunks.append(
            ChunkCost(
                name=str(number),
                elems=elems,
                gathered_elems=elems,
                forward=runs[0],
                backward=runs[1],
                visits=tuple((t, t) for t in visits),
                forward_seconds=forward,
                backward_seconds=2 * forward,
            )
        )
    return Workload(
        name="u",
        chunks=tuple(sorted(chunks, key=lambda chunk: chunk.forward[0])),
        non_model_bytes=(1000,) * (2 * half),
        forward_timesteps=half,
        tokens=1,
        regime=REGIMES["A"],
        clipping=True,
        clip_probability=0.0,
        strategies=(SPECULATIVE_STEP,),
        timestep_seconds=seconds if known else None,
    )


MACHINE = replace(EMULATED, cpu_optimizer={}, gpu_bytes=GiB, host_bytes=GiB, host_memory=0.6e9)


def placed(workload: Workload, *on_host: str) -> Plan:
    places = {c.name: ("host", "host") if c.name in on_host else ("gpu", "gpu") for c in workload.chunks}
    return evaluate_placement(workload, MACHINE, Limits(disk_bytes=0), placements=places, policy="given")


def test_a_shared_gradient_is_there_once_those_before_it_in_the_order_are() -> None:
    """The middle's chunk is reduced first and complete late: others wait for it, and the host begins later."""
    work = u_net()
    names = [chunk.name for chunk in work.chunks]
    held_up = replace(work, chunks=tuple(replace(c, reduced_in=max(10, c.backward[1])) for c in work.chunks))
    assert work.timestep_seconds is not None
    assert Loads(held_up, MACHINE, NONE).backward_to_gradient()[names.index("5")] == pytest.approx(
        sum(work.timestep_seconds[6:11])
    )
    on_host = ("1", "2", "3", "5")
    assert placed(held_up, *on_host).seconds > 1.02 * placed(work, *on_host).seconds


def test_a_window_has_the_compute_of_its_timesteps_and_not_of_chunks_that_end_in_it() -> None:
    """The long last unit shares a chunk with another: its seconds count for the window of every chunk that is used before it."""
    work = u_net()
    names = [chunk.name for chunk in work.chunks]
    loads = Loads(work, MACHINE, NONE)
    seconds = work.timestep_seconds
    assert seconds is not None
    for name, path in (("forward", loads.forward_from_use()), ("backward", loads.backward_to_gradient())):
        for i, chunk in enumerate(work.chunks):
            part = seconds[chunk.forward[0] : 6] if name == "forward" else seconds[6 : chunk.backward[1] + 1]
            assert path[i] == pytest.approx(sum(part)), (name, names[i])
    blind = Loads(u_net(known=False), MACHINE, NONE)
    at = names.index("5")  # its gradient comes after the last unit's backward, which the chunk "4" is given
    assert blind.backward_to_gradient()[at] < 0.5 * loads.backward_to_gradient()[at]


@pytest.mark.parametrize("on_host", [("5",), ("4", "5"), ("1", "2", "3"), ("1", "2", "3", "4", "5", "6")])
def test_seconds_are_those_of_the_events(on_host: tuple[str, ...]) -> None:
    made = placed(u_net(), *on_host)
    assert made.seconds == pytest.approx(seconds_by_events(made), rel=0.1)


def test_without_them_a_plan_overlooks_what_the_host_cannot_hide() -> None:
    every = ("1", "2", "3", "4", "5", "6")
    blind, made = placed(u_net(known=False), *every), placed(u_net(), *every)
    assert blind.seconds < 0.8 * made.seconds


def test_the_best_plan_is_as_fast_as_it_says() -> None:
    limits = Limits(gpu_bytes=50 * 10**6, disk_bytes=0)
    made, blind = plan(u_net(), MACHINE, limits), plan(u_net(known=False), MACHINE, limits)
    chosen = evaluate_placement(
        u_net(),
        MACHINE,
        limits,
        placements={chunk.name: (chunk.parameters, chunk.state) for chunk in blind.chunks},
        policy="blind",
    )
    assert made.host_elems
    assert made.seconds == pytest.approx(seconds_by_events(made), rel=0.1)
    assert seconds_by_events(made) <= seconds_by_events(chosen)


def test_compute_waits_for_a_copy_that_is_longer_than_the_unit_before() -> None:
    """Two copies of 1 ms each, behind units of 2 ms and of 0.25 ms."""
    work = u_net(elems=MACHINE_COPY)
    loads = Loads(work, MACHINE, NONE)
    names = [chunk.name for chunk in work.chunks]
    streamed = 2  # the option
    assert loads.waits_forward[names.index("1"), streamed] == 0.0  # the first unit takes 50 ms
    assert loads.waits_forward[names.index("3"), streamed] == pytest.approx(0.002 - 0.001)
    assert loads.waits_backward[names.index("2"), streamed] == pytest.approx(0.0)
    assert not loads.waits_forward[:, (0, 1)].any()  # resident
    table, _ = seconds_table(work, MACHINE, SPECULATIVE_STEP)
    row = table.names.index("compute")
    assert table.chunk[names.index("3"), streamed, row] == pytest.approx(0.001)


MACHINE_COPY = int(0.002 * MACHINE.h2d / 2)
"""Elements whose parameters are copied in 2 ms."""


def test_seconds_of_timesteps_are_checked_and_scaled() -> None:
    with pytest.raises(SpecError, match="timestep_seconds has 3 numbers"):
        replace(u_net(), timestep_seconds=(1.0, 1.0, 1.0))
    found = u_net().taking(forward=2.0, backward=5.0, kept=())
    assert found.timestep_seconds is not None
    assert sum(found.timestep_seconds[:6]) == pytest.approx(2.0)
    assert sum(found.timestep_seconds[6:]) == pytest.approx(5.0)
