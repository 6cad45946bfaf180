"""Shadow copies of the state of some chunks: what a host has memory for, as fast as a simulation of the step."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from meshfold.mesh import SpecError
from meshfold.zero_gemini.planner import (
    H200,
    SPECULATIVE_STEP,
    SPLIT_STEP,
    GiB,
    Limits,
    Machine,
    Plan,
    Workload,
    plan,
    recost,
)

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file
from planner_cases import stack

MACHINE = replace(
    H200,
    name="one H200, 32 cores",
    flops=630e12,
    host_memory=104e9,
    gpu_streaming=29.4e9,
    host_memory_while_streaming=93e9,
    moments_memory=165e9,
    cpu_optimizer={},
)
"""Rates of the machine on which a Qwen3 of 8B under 40 GiB waited for the host in its forward."""
LAYERS = 32
BOTH = (SPLIT_STEP, SPECULATIVE_STEP)


def work(**changes: object) -> Workload:
    made = stack(
        machine=MACHINE,
        layers=LAYERS,
        layer_elems=230_000_000,
        tokens=16_384,
        kept_bytes=GiB,
        checkpoint_bytes=130_000_000,
        working_bytes=4 * GiB,
        clip_probability=0.0,
    )
    return replace(made, **{"strategies": BOTH, **changes})  # type: ignore[arg-type]


def planned(host: int, *, machine: Machine = MACHINE, **changes: object) -> Plan:
    return plan(work(**changes), machine, Limits(gpu_bytes=36 * GiB, host_bytes=host * GiB, disk_bytes=0))


def simulated(made: Plan) -> float:
    """Seconds of a step, many after the first: the cores step chunks with a copy in the backward, the last gradient first; then
    the first halves of the others in the order of their use, and their second halves. The device's share is a faster core."""
    machine, regime, cost = made.machine, made.workload.regime, made.workload.chunks
    places = {chunk.name: chunk for chunk in made.chunks}
    count = made.workload.shadow_copies or 0
    on_host = [chunk for chunk in cost if places[chunk.name].state == "host"]
    has_copy = {chunk.name for chunk in cost[:count]} & {chunk.name for chunk in on_host}
    kept = {layer.name for layer in made.layers if layer.kept}
    again = {layer.last + 1: layer.recompute_seconds for layer in made.workload.layers if layer.name not in kept}
    cores = machine.host_memory_while_streaming
    first = 1 / (cores / regime.first_pass + machine.gpu_streaming / regime.first_pass)  # seconds an element
    whole = 1 / (cores / regime.out_of_place + machine.gpu_streaming / regime.step)
    second = regime.second_pass / machine.moments_memory
    device = sum(c.elems for c in cost if c not in on_host) * regime.step / machine.gpu_memory
    host = now = 0.0
    ready: dict[str, float] = {}
    ends = []
    for _ in range(12):
        gradients: list[tuple[float, str]] = []
        for chunk in cost:
            now = max(now, ready.get(chunk.name, 0.0)) + chunk.forward_seconds
        for chunk in sorted(cost, key=lambda one: one.backward):
            now += chunk.backward_seconds + again.get(chunk.backward[0], 0.0)
            if chunk.name in has_copy:
                gradients.append((now + regime.gradient * chunk.elems / machine.d2h, chunk.name))
        now += device
        elems = {chunk.name: chunk.elems for chunk in cost}
        while gradients:
            there = [one for one in gradients if one[0] <= host] or [min(gradients)]
            gradients.remove(there[-1])
            host = max(host, there[-1][0]) + whole * elems[there[-1][1]]
            ready[there[-1][1]] = host
        host = max(host, now)
        for chunk in on_host:
            if chunk.name not in has_copy:
                host += first * chunk.elems
                ready[chunk.name] = host
        host += sum(second * chunk.elems for chunk in on_host if chunk.name not in has_copy)
        ends.append(now)
    return (ends[-1] - ends[-7]) / 6


@pytest.mark.parametrize("host", [85, 90, 100])
def test_a_host_with_memory_for_some_copies_makes_them(host: int) -> None:
    split, every = planned(80), planned(500, strategies=(SPECULATIVE_STEP,))
    assert split.workload.shadow_copies is None and split.strategy != SPECULATIVE_STEP
    assert every.workload.shadow_copies is None and every.peak_host_bytes > 1.2 * host * GiB
    made = planned(host)
    count = made.workload.shadow_copies
    assert made.strategy == SPECULATIVE_STEP and count is not None and 0 < count < LAYERS
    assert made.seconds < 0.94 * split.seconds
    assert made.peak_host_bytes <= host * GiB
    # 12 bytes an element of state, as much again for a copy, 2 for gradients that wait for the norm
    assert made.peak_host_bytes == 12 * (made.host_elems + made.copied_elems) + 2 * made.host_elems
    copied = [one.state == "host" for one in made.chunks[:count]]
    assert made.copied_elems == 230_000_000 * sum(copied) > 0
    assert 0.94 * made.seconds < simulated(made) < 1.02 * made.seconds


def test_copies_of_some_are_faster_than_of_all_where_the_host_is_slow() -> None:
    """In halves a step moves more bytes, but cores that are idle until the first gradient comes move them."""
    every, some = planned(500, strategies=(SPECULATIVE_STEP,)), planned(500)
    assert some.workload.shadow_copies is not None
    assert some.seconds < 0.97 * every.seconds and some.peak_host_bytes < 0.9 * every.peak_host_bytes


def test_more_memory_for_copies_is_no_slower() -> None:
    seconds = [planned(host).seconds for host in range(75, 140, 5)]
    assert all(more <= less * 1.002 for less, more in pairwise(seconds))
    assert seconds[-1] < 0.9 * seconds[0]


def test_the_same_placement_takes_less_host_memory_with_fewer_copies() -> None:
    made = planned(130)
    peaks = [recost(made, work(shadow_copies=count), MACHINE).peak_host_bytes for count in (0, 8, LAYERS)]
    assert peaks[0] < peaks[1] < peaks[2]


def test_copies_are_planned_again_with_less_memory() -> None:
    made = planned(130)
    again = plan(made.workload, made.machine, replace(made.limits, host_bytes=78 * GiB))
    assert again.workload.shadow_copies is None and again.strategy != SPECULATIVE_STEP


def test_steps_that_may_clip_have_no_copies_of_some() -> None:
    assert planned(120, clip_probability=0.5).workload.shadow_copies is None
    with pytest.raises(SpecError, match=r"shadow_copies=3 .*clip_probability=0.0, not 0.5"):
        work(shadow_copies=3, clip_probability=0.5)
