"""Seconds and bytes of a plan are those of the formulas of the design, worked out here by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshfold.mesh.errors import SpecError
from meshfold.zero_gemini.planner import (
    H200,
    REGIMES,
    ChunkCost,
    GiB,
    Layer,
    Limits,
    Machine,
    MiB,
    Plan,
    Regime,
    Workload,
    cpu,
    cuda,
    static,
)
from meshfold.zero_gemini.planner.memory import gather_windows
from meshfold.zero_gemini.planner.options import NONE, SPECULATIVE_STEP, SPLIT_STEP
from meshfold.zero_gemini.planner.seconds import seconds_table

sys.path.append(str(Path(__file__).parent))
from planner_cases import EMULATED, stack

MACHINE = replace(EMULATED, cpu_optimizer={}, gpu_bytes=GiB, host_bytes=GiB)
E, LAYERS = 100_000, 6


def work(**changes: object) -> Workload:
    given = dict(machine=MACHINE, layers=LAYERS, layer_elems=E, tokens=1000, regime="A", clipping=False) | changes
    return stack(**given)  # type: ignore[arg-type]


def terms(plan: Plan, phase: str) -> dict[str, float]:
    return {term.name: term.seconds for term in plan.terms if term.phase == phase}


def held_on_host(**changes: object) -> Workload:
    """Two micro-steps: gradients have a place on the host each, where they are summed."""
    return replace(work(**changes), accumulation=2)


def test_gradients_in_a_ring_keep_the_whole_step_in_the_backward() -> None:
    made = cpu(work(), MACHINE)
    n = LAYERS * E
    forward, backward = terms(made, "forward"), terms(made, "backward")
    assert [name for name, _, _ in made.phases] == ["forward", "backward"]
    # what was stepped is brought up when its turn has come, so compute waits for it
    assert forward["compute"] == pytest.approx(MACHINE.seconds(2.0 * n * 1000) + 2 * n / MACHINE.h2d)
    assert forward["h2d"] == pytest.approx(2 * n / MACHINE.h2d)
    assert forward["host memory"] == pytest.approx(2 * n / MACHINE.host_memory)
    assert backward["compute"] == pytest.approx(MACHINE.seconds(6.0 * n * 1000))  # 4 and 2 for recompute
    moved = 26 * n + 2 * (n - E) + 2 * n  # all is stepped, all but one is loaded, gradients come down
    assert backward["host memory"] == pytest.approx(moved / MACHINE.host_memory)
    assert backward["d2h"] == pytest.approx(2 * n / MACHINE.d2h)
    assert made.seconds == pytest.approx(sum(seconds for _, _, seconds in made.phases))


def test_no_chunk_is_stepped_before_its_gradient_is_there() -> None:
    slow = replace(MACHINE, flops=1e9)  # compute is long: the first chunk's step comes after all of it
    made = cpu(work(machine=slow), slow)
    exposed = (26 + 2) * E / slow.host_memory + 2 * E / slow.d2h
    assert made.tail_seconds == pytest.approx(exposed)
    assert made.binding == ("forward: compute", "backward: exposed tail")
    first = static(work(machine=slow), slow, offload_optim_frac=0.8, offload_param_frac=0.8)
    assert first.tail_seconds == 0 and first.binding == ("forward: compute", "backward: compute")


def test_gradients_on_the_host_let_a_step_be_its_busiest_resource() -> None:
    made = cpu(held_on_host(), MACHINE)
    n = LAYERS * E
    found = terms(made, "step")
    compute = MACHINE.seconds(8.0 * n * 1000) + 2 * n / MACHINE.h2d  # 6 and 2 for recompute; copies
    # the last chunk is used at the turn of the step and the one before is prefetched across it: both are loaded once
    up = 2 * n + 2 * (n - E)
    down = 2 * n
    assert found["compute"] == pytest.approx(compute)
    assert found["h2d"] == pytest.approx(up / MACHINE.h2d)
    assert found["d2h"] == pytest.approx(down / MACHINE.d2h)
    assert found["pcie"] == pytest.approx((up + down) / MACHINE.pcie_both)
    assert found["host memory"] == pytest.approx((26 * n + up + down) / MACHINE.host_memory)
    assert found["disk"] == found["cpu optimizer"] == found["collectives"] == 0
    seconds = {name: total for name, _, total in made.phases}
    assert seconds["step"] == pytest.approx(
        max(s for name, s in found.items() if name != "exposed tail") + found["exposed tail"]
    )


def test_the_exposed_tail_is_what_the_first_chunk_waits_for() -> None:
    slow = replace(MACHINE, flops=1e9)  # compute is long: only the first chunk's own way is exposed
    made = cpu(held_on_host(machine=slow), slow)
    step = (26 + 2 + 2) * E / slow.host_memory
    # its way up, and those of the chunks behind it, are in the busiest resource already: compute waits for them
    assert terms(made, "step")["exposed tail"] == pytest.approx(step + 2 * E / slow.d2h)
    assert made.binding[0] == "step: exposed tail"
    first = static(held_on_host(machine=slow), slow, offload_optim_frac=0.8, offload_param_frac=0.8)
    assert first.chunks[0].state == "gpu" and first.chunks[1].state == "host"
    assert first.tail_seconds == 0
    assert first.binding[0] == "step: compute"


def test_the_split_step_shortens_the_forward() -> None:
    made = cpu(work(clipping=True), MACHINE)
    assert made.strategy == "just_in_time_split"
    n = LAYERS * E
    assert terms(made, "forward")["host memory"] == pytest.approx((18 * n + 2 * n) / MACHINE.host_memory)
    moments = (18 * n + 2 * (n - E) + 2 * n) / MACHINE.host_memory
    assert terms(made, "backward")["host memory"] == pytest.approx(moments)
    assert made.seconds == pytest.approx(sum(seconds for _, _, seconds in made.phases))


def split(machine: Machine) -> Workload:
    """Of what training does: the step in halves."""
    return replace(work(machine=machine, clipping=True), strategies=(SPLIT_STEP,))


def test_what_passes_through_the_device_is_off_the_cores() -> None:
    rate, beside = 0.3 * MACHINE.host_memory, 0.9 * MACHINE.host_memory
    short = split(replace(MACHINE, flops=1e15))  # the backward has no time for more moments
    passing = replace(MACHINE, gpu_streaming=rate, host_memory_while_streaming=beside, streaming_bytes=MiB)
    alone, made = cpu(short, MACHINE), cpu(short, passing)
    assert alone.strategy == made.strategy == "just_in_time_split"
    n = LAYERS * E
    together = n / (beside / 18 + rate / 26)  # seconds in which both have stepped all
    # the rate of the cores was one while both halves of the parameters went up
    assert terms(made, "forward")["host memory"] == pytest.approx(together)
    through = rate * together / 26  # elements that passed through
    assert terms(made, "forward")["h2d"] == pytest.approx((2 * n + 14 * through) / MACHINE.h2d)
    left = 18 * (n - through) / MACHINE.host_memory
    down = terms(alone, "backward")["host memory"] - 18 * n / MACHINE.host_memory
    assert terms(made, "backward")["host memory"] == pytest.approx(left + down)
    assert made.peak_gpu_bytes == alone.peak_gpu_bytes + MiB


def test_the_device_leaves_moments_where_the_backward_has_time_for_them() -> None:
    """A third fewer bytes before the forward, for more in the backward: worth it while compute is longer there."""
    rate, n = 0.3 * MACHINE.host_memory, LAYERS * E
    passing = replace(MACHINE, gpu_streaming=rate, host_memory_while_streaming=rate, streaming_bytes=MiB, h2d=1e12)
    busy = replace(passing, flops=4e11)
    long = cpu(split(busy), busy)
    assert long.strategy == "just_in_time_split_on_device"
    together = n / (rate / 18 + rate / 18)
    assert terms(long, "forward")["host memory"] == pytest.approx(together)
    assert terms(long, "forward")["h2d"] == pytest.approx((2 * n + 14 * n / 2) / 1e12)
    down = 2 * (n - E) + 2 * n
    assert terms(long, "backward")["host memory"] == pytest.approx((18 * n + down) / MACHINE.host_memory)
    assert "backward: compute" in long.binding

    assert cpu(split(replace(MACHINE, flops=1e15)), passing).strategy == "just_in_time_split"
    narrow = replace(busy, h2d=rate / 2)  # no more goes up than there is room for: 14 bytes of state, 2 of parameters
    shared = terms(cpu(split(narrow), narrow), "forward")
    assert shared["h2d"] <= 1.001 * max(shared["host memory"], 16 * n / narrow.h2d)


def test_nothing_passes_through_where_all_is_on_the_device() -> None:
    passing = replace(MACHINE, gpu_streaming=1e9, host_memory_while_streaming=1e9, streaming_bytes=MiB)
    assert cuda(work(clipping=True), passing).peak_gpu_bytes == cuda(work(clipping=True), MACHINE).peak_gpu_bytes
    with pytest.raises(SpecError, match="says nothing without host_memory_while_streaming"):
        replace(MACHINE, gpu_streaming=1e9)


def test_the_whole_step_of_what_is_on_disk_moves_26_bytes_in_the_forward() -> None:
    # from disk: 26 bytes of the CPU, 2 of the upload, 20 of the disk's own traffic; from memory: the first half's 18
    table, phases = seconds_table(work(clipping=True), MACHINE, SPLIT_STEP)
    row = table.names.index("host memory")
    assert phases[0].start <= row < phases[0].stop
    assert table.chunk[0, 2, row] * MACHINE.host_memory == pytest.approx((18 + 2) * E)
    assert table.chunk[0, 4, row] * MACHINE.host_memory == pytest.approx((26 + 2 + 20) * E)
    disk = table.names.index("disk")
    assert table.chunk[0, 4, disk] == pytest.approx(10 * E / MACHINE.disk_read + 10 * E / MACHINE.disk_write)


def test_state_that_a_step_reads_twice_takes_its_reads_seconds_twice() -> None:
    """LAMB's and LARS's, whose norms are known after the first reading."""
    twice = replace(work(clipping=True), regime=replace(REGIMES["A"], disk_reads=2))
    table, _ = seconds_table(twice, MACHINE, SPLIT_STEP)
    disk, host = table.names.index("disk"), table.names.index("host memory")
    assert table.chunk[0, 4, disk] == pytest.approx(20 * E / MACHINE.disk_read + 10 * E / MACHINE.disk_write)
    assert table.chunk[0, 4, host] * MACHINE.host_memory == pytest.approx((26 + 2 + 30) * E)
    stepped, _ = seconds_table(replace(twice, clipping=False), MACHINE, NONE)
    assert stepped.chunk[:, 4, stepped.names.index("disk")].max() == pytest.approx(
        20 * E / MACHINE.disk_read + 10 * E / MACHINE.disk_write
    )


def test_a_step_in_one_call_hides_behind_nothing() -> None:
    """Torch's optimizers step all chunks in one call when all gradients are there; Adam's steps run beside the next forward."""
    for disk_reads in (1, 2):
        regime = Regime.of(
            "A", torch.bfloat16, torch.float32, accumulation=1, ranks=1, moments=2, ours=False, disk_reads=disk_reads
        )
        assert (regime.state, regime.ours, REGIMES["A"].ours) == (12, False, True)
        held = replace(work(clipping=True), regime=regime)
        table, phases = seconds_table(held, MACHINE, SPLIT_STEP)
        assert [(phase.name, phase.weight) for phase in phases] == [("forward", 1), ("backward", 1), ("optimizer", 1)]
        disk = disk_reads * 12 * E / MACHINE.disk_read + 12 * E / MACHINE.disk_write
        for phase in phases:
            part = range(phase.start, phase.stop)
            busy = {table.names[row]: float(table.chunk[0, 4, row]) for row in part}
            assert busy.get("disk", 0.0) == pytest.approx(disk if phase.name == "optimizer" else 0.0)
            stepped = busy["host memory"] * MACHINE.host_memory
            if phase.name == "optimizer":
                assert stepped == pytest.approx((regime.step + (disk_reads + 1) * 12) * E)
            else:
                assert stepped <= 3 * regime.parameter * E, "copies alone"
        made = cpu(held, MACHINE)
        assert made.strategy == SPLIT_STEP
        assert made.seconds == pytest.approx(sum(seconds for _, _, seconds in made.phases))
        after = {name: seconds for name, _, seconds in made.phases}["optimizer"]
        assert after == pytest.approx(LAYERS * E * regime.step / MACHINE.host_memory)
        _, phases = seconds_table(replace(held, clipping=False), MACHINE, NONE)
        assert "optimizer" not in {phase.name for phase in phases}, "steps of single chunks run beside the backward"


def test_out_of_place_is_picked_when_clipping_is_rare_and_host_memory_is_there() -> None:
    slow = replace(MACHINE, host_memory=5e9)  # the step is about as long as compute, and longer than the forward
    often, rare = work(clipping=True), work(clipping=True, clip_probability=0.01)
    assert cpu(often, slow).strategy == "just_in_time_split"
    made = cpu(rare, slow)
    assert made.strategy == "out_of_place"
    assert made.seconds < cpu(often, slow).seconds
    n = LAYERS * E
    assert made.peak_host_bytes == (12 + 12 + 2) * n
    # no room for the second buffer
    assert cpu(rare, slow, Limits(host_bytes=(12 + 2) * n)).strategy == "just_in_time_split"
    weights = {name: weight for name, weight, _ in made.phases}
    assert weights == {"step": 0.99, "forward": 0.01, "backward": 0.01}
    assert made.seconds == pytest.approx(sum(weight * seconds for _, weight, seconds in made.phases))


def test_out_of_place_the_device_takes_its_share() -> None:
    n = LAYERS * E
    table, _ = seconds_table(work(clipping=True, clip_probability=0.0), MACHINE, SPECULATIVE_STEP)
    host = table.names.index("host memory")
    alone = table.chunk[:, 2, host].sum() * MACHINE.host_memory
    up = 2 * (2 * n - E)  # for each half of the step; the last of the forward is the first of the backward
    assert alone == pytest.approx((26 + 2) * n + up)
    both = replace(MACHINE, gpu_streaming=26e9, host_memory_while_streaming=26e9)  # as many elements a second each
    table, _ = seconds_table(work(clipping=True, clip_probability=0.0), both, SPECULATIVE_STEP)

    def seconds(name: str) -> float:
        return float(table.chunk[:, 2, table.names.index(name)].sum())

    assert seconds("host memory") == pytest.approx(n / 2e9 + (up + 2 * n) / both.host_memory)
    assert seconds("h2d") == pytest.approx((up + 14 / 2 * n) / both.h2d)
    assert seconds("d2h") == pytest.approx((2 + 12 / 2) * n / both.d2h)
    assert seconds("pcie") == pytest.approx((up + (2 + 26 / 2) * n) / both.pcie_both)


@pytest.mark.parametrize(("regime", "held"), [("A", 12), ("B", 8), ("C", 6.03125), ("fp16", 14)])
def test_bytes_an_element(regime: str, held: float) -> None:
    n = LAYERS * E
    assert REGIMES[regime].parameter + REGIMES[regime].state == held
    assert cpu(work(regime=regime, clipping=True), MACHINE).peak_host_bytes == (held + 2) * n
    ring = 2 * 2 * E  # without clipping gradients pass through a ring of two chunks
    assert cpu(work(regime=regime), MACHINE).peak_host_bytes == held * n + ring
    on_gpu = cuda(work(regime=regime, clipping=True), MACHINE)
    assert on_gpu.peak_gpu_bytes == (held + 2) * n  # at the last timestep every gradient is held
    assert on_gpu.gpu_bytes[0] == held * n
    assert on_gpu.peak_host_bytes == 0


def test_streamed_parameters_are_on_the_gpu_in_their_windows() -> None:
    made = cpu(work(), MACHINE)
    # timestep 0: chunk 0 used, chunk 1 prefetched
    assert made.gpu_bytes[0] == 2 * 2 * E
    # last timestep: chunk 0 used, its gradient, and chunk 1's on its way down
    assert made.gpu_bytes[-1] == 2 * E + 2 * E + 2 * E


def test_windows_meet_at_the_turn() -> None:
    workload = work()
    assert gather_windows(workload.chunks[0], workload) == ((0, 0), (10, 11))
    assert gather_windows(workload.chunks[5], workload) == ((4, 6),)


def test_data_ranks_hold_shards_and_gather_chunks() -> None:
    made = cpu(work(data_ranks=4), MACHINE)
    assert made.peak_host_bytes == (12 * LAYERS * E + 2 * 2 * E) // 4
    assert made.gpu_bytes[0] == 2 * 2 * E
    collectives = 2 * LAYERS * E * 3 / 4 / MACHINE.collective
    assert terms(made, "forward")["collectives"] == pytest.approx(collectives)
    assert terms(made, "backward")["collectives"] == pytest.approx(2 * collectives)


def test_a_frozen_chunk_has_neither_state_nor_gradient() -> None:
    workload = work(clipping=True)
    frozen = replace(workload, chunks=tuple(replace(chunk, trainable=False) for chunk in workload.chunks))
    made = cpu(frozen, MACHINE)
    assert {(c.state, c.parameters, c.gradients) for c in made.chunks} == {("none", "host", "none")}
    assert made.peak_host_bytes == 2 * LAYERS * E
    assert max(made.gpu_bytes) == 2 * 2 * E
    assert terms(made, "backward")["d2h"] == 0
    assert cuda(frozen, MACHINE).peak_gpu_bytes == 2 * LAYERS * E


def test_kept_activations_save_their_recompute_and_hold_their_bytes() -> None:
    workload = work(kept_bytes=3 * MiB)
    without, kept = cuda(workload, MACHINE), cuda(workload, MACHINE, kept=["layer1", "layer2"])
    assert without.seconds - kept.seconds == pytest.approx(2 * MACHINE.seconds(2.0 * E * 1000))
    assert kept.gpu_bytes[5] - without.gpu_bytes[5] == 2 * 3 * MiB
    assert kept.gpu_bytes[0] == without.gpu_bytes[0]


def test_predictions_for_what_was_measured() -> None:
    """OPT-6.7B, 16 sequences of 1024 with recompute, everything on one H200: 1.43 s measured with plain torch."""
    workload = stack(machine=H200, layers=34, layer_elems=6_860_000_000 // 34, tokens=16384, working_bytes=4 * GiB)
    assert cuda(workload, H200).seconds == pytest.approx(1.43, rel=0.05)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="h2d=0"):
        replace(H200, h2d=0)
    with pytest.raises(SpecError, match="cpu_optimizer"):
        replace(H200, cpu_optimizer={"A": 0.0})
    chunk = work().chunks[0]
    with pytest.raises(SpecError, match="in order"):
        replace(chunk, forward=(3, 2))
    with pytest.raises(SpecError, match="at least one element"):
        replace(chunk, elems=0)
    with pytest.raises(SpecError, match="unique"):
        replace(work(), chunks=(chunk, chunk))
    with pytest.raises(SpecError, match="no chunk"):
        replace(work(), chunks=())
    with pytest.raises(SpecError, match="order of first use"):
        replace(work(), chunks=work().chunks[::-1])
    with pytest.raises(SpecError, match="wrong half"):
        replace(work(), forward_timesteps=3)
    with pytest.raises(SpecError, match="does not lie in"):
        replace(work(), layers=(Layer(name="x", kept_bytes=1, recompute_seconds=1.0, first=0, last=99),))
    with pytest.raises(SpecError, match="clip_probability"):
        replace(work(), clip_probability=1.5)
    with pytest.raises(SpecError, match="below zero"):
        Limits(gpu_bytes=-1).on(MACHINE)
    assert isinstance(MACHINE, Machine) and isinstance(chunk, ChunkCost)
