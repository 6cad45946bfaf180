"""Placement auto watches two steps, plans, and moves chunks: within its limits, and without changing a bit of the training."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine
from meshfold.engine.zero import device_limit, measured_plans
from meshfold.engine.zero import residency as residency_module
from meshfold.engine.zero.measured_plans import MeasuredPlans
from meshfold.engine.zero.residency import Residency
from meshfold.engine.zero.states import ZeroStates
from meshfold.engine.zero.watching import typical_timings
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini import Chunk, DiskError, Gemini, MemoryPlanError
from meshfold.zero_gemini.machine_rates import observed
from meshfold.zero_gemini.machine_rates import samples as measuring
from meshfold.zero_gemini.optimizer import StepKind, StepTiming
from meshfold.zero_gemini.optimizer import kernel_runs as runs
from meshfold.zero_gemini.optimizer.cpu_executor import Worker
from meshfold.zero_gemini.optimizer.speculative_updates import SpeculativeUpdates
from meshfold.zero_gemini.planner import SPECULATIVE_STEP, SPLIT_STEP, Machine, MiB, Plan, Workload, recost
from meshfold.zero_gemini.profiler import PhaseSeconds

STEPS = 4
PROCESS = 500 * MiB


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=128, hidden=128, layers=5, heads=4, max_positions=16, dropout=0.0))


def engine_of(zero: dict[str, Any], **settings: Any) -> Engine:
    given: dict[str, Any] = {
        "optimizer": dict(name="adamw", lr=1e-2),
        "precision": "bf16",
        "clip_grad_norm": 0.5,
    }
    return Engine(gpt, dict(zero=zero), **{**given, **settings})


def trained(zero: dict[str, Any], steps: int = STEPS, **settings: Any) -> tuple[list[float], dict[str, Tensor], Engine]:
    """Losses, whole state in the end, and the engine."""
    engine = engine_of(zero, **settings)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        ids = torch.randint(128, (4, 16), generator=generator)
        losses.append(engine.train_step(engine.shard_batch(ids)))
    return losses, engine.full_state_dict(), engine


def residency(engine: Engine) -> Residency:
    states = engine.states
    assert isinstance(states, ZeroStates)
    return states.residency


def places(engine: Engine) -> set[tuple[str, str]]:
    states = engine.states
    assert isinstance(states, ZeroStates)
    return {(placement.parameters, placement.state) for placement in states.gemini.placements.values()}


def assert_same(
    found: tuple[list[float], dict[str, Tensor], Engine],
    wanted: tuple[list[float], dict[str, Tensor], Engine],
) -> None:
    assert found[0] == wanted[0]
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name


def limits_are_kept(folder: str, tight: int, every: int) -> None:
    with mock.patch(
        "meshfold.zero_gemini.machine_rates.step_measurements.resident_bytes", return_value=PROCESS
    ):  # on every machine
        keep_limits(folder, tight, every)


def keep_limits(folder: str, tight: int, every: int) -> None:
    wanted = trained(dict(stage=3, placement="cuda"))
    seen = set()
    zeros: list[dict[str, Any]] = [
        dict(gpu_memory_limit=64 * MiB),
        dict(gpu_memory_limit=10 * MiB),
        dict(gpu_memory_limit=tight),
        dict(gpu_memory_limit=12 * MiB, stage=2),
        dict(gpu_memory_limit=tight, offload_path=folder, host_memory_limit=_host_limit()),
    ]
    for zero in zeros[::every]:
        found = trained({"stage": 3, **zero})
        assert_same(found, wanted)
        engine = found[2]
        plan = residency(engine).plan
        assert plan is not None and residency(engine).measured is not None
        assert plan.peak_gpu_bytes <= zero["gpu_memory_limit"]
        seen |= places(engine)
        engine.close()
    wanted[2].close()
    assert ("device", "device") in seen and {("host", "host"), ("device", "host")} & seen, seen


@pytest.fixture
def whole_paces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the host's step before its timing is taken; else the timing may be of the step before, or of none."""

    def whole(gemini: Gemini) -> dict[StepKind, StepTiming]:
        gemini.flush()
        return taken(gemini)

    taken = Gemini.take_step_timings
    monkeypatch.setattr(Gemini, "take_step_timings", whole)
    monkeypatch.setattr(observed, "ENOUGH_ELEMS", 1)  # the model is small


@pytest.mark.usefixtures("whole_paces")
def test_the_host_is_as_fast_as_the_watched_steps_showed() -> None:
    _, _, engine = trained(dict(gpu_memory_limit=10 * MiB), steps=2)
    found = residency(engine)
    timings, plan = found._watcher.timings, found.plan
    assert plan is not None
    assert min(timings[half].elements for half in ("parameters", "moments")) > 0
    rate = (18 + 2) * timings["parameters"].elements / timings["parameters"].seconds
    assert plan.machine.host_memory == pytest.approx(rate)
    engine.close()


@pytest.mark.usefixtures("whole_paces")
def test_a_plan_is_corrected_by_its_own_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Plan, dict[StepKind, StepTiming], PhaseSeconds, Plan]] = []

    def watched(
        plans: MeasuredPlans,
        made: Plan,
        *,
        peak: int,
        timings: dict[StepKind, StepTiming],
        compute: PhaseSeconds,
    ) -> Plan:
        told.append((made, dict(timings), compute, looked(plans, made, peak=peak, timings=timings, compute=compute)))
        return told[-1][-1]

    looked = MeasuredPlans.seen
    monkeypatch.setattr(MeasuredPlans, "seen", watched)
    # On a loaded machine the correction may move chunks, and the new plan's first two steps are not measured.
    steps = residency_module.TRACED_STEPS + 2 * residency_module.CORRECTED_AFTER
    wanted = trained(dict(stage=3, placement="cuda"), steps=steps)
    found = trained(dict(gpu_memory_limit=10 * MiB), steps=steps)
    assert_same(found, wanted)
    [(before, timings, compute, after)] = told  # once
    work = after.workload
    assert sum(chunk.forward_seconds for chunk in work.chunks) == pytest.approx(compute.forward)
    again = sum(layer.recompute_seconds for layer in work.layers)
    assert sum(chunk.backward_seconds for chunk in work.chunks) + again == pytest.approx(compute.backward)
    assert after.machine.host_memory == pytest.approx(
        20 * timings["parameters"].elements / timings["parameters"].seconds
    )
    assert after.machine.moments_memory == pytest.approx(22 * timings["moments"].elements / timings["moments"].seconds)
    assert (after.chunks, after.strategy, after.gpu_bytes) == (
        before.chunks,
        before.strategy,
        before.gpu_bytes,
    )
    plan, measured = residency(found[2]).plan, residency(found[2]).measured
    assert plan is not None and plan.machine == after.machine and plan.seconds <= after.seconds
    assert measured is not None and {*measured.host_steps} == {"parameters", "moments"}
    for engine in (wanted[2], found[2]):
        engine.close()


def test_slow_steps_in_between_do_not_count_for_a_plan() -> None:
    """On a host with other work two of four steps took 1.4 times as long as those before and after."""
    steps: list[dict[StepKind, StepTiming]] = [
        {"parameters": StepTiming(100, seconds)} for seconds in (1.0, 5.0, 1.1, 1.2)
    ]
    steps[1]["GPU streaming"] = StepTiming(10, 1.0)
    found = typical_timings(steps)
    assert found["parameters"].elements == 400 and found["parameters"].seconds == pytest.approx(4 * 1.15)
    assert found["GPU streaming"] == StepTiming(10, 1.0)
    assert typical_timings([]) == {} and typical_timings([{"disk": StepTiming()}]) == {}


def expecting(*strategies: str) -> Any:
    """Let plans be of these ways of clipping, where steps may be speculative."""
    made = MeasuredPlans.plan

    def plan(self: MeasuredPlans, workload: Workload, machine: Machine, *, shrunk: float) -> Plan:
        if SPECULATIVE_STEP in (workload.strategies or ()):
            workload = replace(workload, strategies=strategies)
        return made(self, workload, machine, shrunk=shrunk)

    return mock.patch.object(MeasuredPlans, "plan", plan)


def kept_speculative(into: list[int]) -> Any:
    """Notes of how many chunks each step made speculatively."""
    keep = SpeculativeUpdates.keep

    def kept(self: SpeculativeUpdates, steps: Any) -> set[Chunk]:
        into.append(len(found := keep(self, steps)))
        return found

    return mock.patch.object(SpeculativeUpdates, "keep", kept)


def test_steps_that_count_alike_are_made_speculatively() -> None:
    kept: list[int] = []
    wanted = trained(dict(stage=3, placement="cuda"), steps=6, clip_grad_norm=1e3)
    with expecting(SPECULATIVE_STEP), kept_speculative(kept):
        found = trained(dict(gpu_memory_limit=10 * MiB), steps=6, clip_grad_norm=1e3)
    assert_same(found, wanted)
    plan = residency(found[2]).plan
    assert plan is not None and plan.strategy == SPECULATIVE_STEP
    assert kept[:2] == [0, 0] and min(kept[2:]) > 0  # from the plan on
    for engine in (wanted[2], found[2]):
        engine.close()


def copies_of_some() -> Any:
    """Let plans give shadow copies to the first half of the host's chunks, where steps may be speculative."""
    made = MeasuredPlans.plan

    def plan(self: MeasuredPlans, workload: Workload, machine: Machine, *, shrunk: float) -> Plan:
        split = replace(workload, strategies=(SPLIT_STEP,), shadow_copies=None)
        found = made(self, split, machine, shrunk=shrunk)
        if SPECULATIVE_STEP not in (workload.strategies or ()):
            return found
        on_host = [place for place, chunk in enumerate(found.chunks) if chunk.state == "host"]
        some = replace(workload, ready=found.workload.ready, shadow_copies=on_host[len(on_host) // 2])
        return recost(replace(found, strategy=SPECULATIVE_STEP), some, machine)

    return mock.patch.object(MeasuredPlans, "plan", plan)


def test_a_plan_with_copies_of_some_chunks_makes_their_steps_speculatively() -> None:
    kept: list[int] = []
    wanted = trained(dict(stage=3, placement="cuda"), steps=6, clip_grad_norm=1e3)
    with copies_of_some(), kept_speculative(kept):
        found = trained(dict(gpu_memory_limit=10 * MiB), steps=6, clip_grad_norm=1e3)
    assert_same(found, wanted)
    plan = residency(found[2]).plan
    assert plan is not None and plan.strategy == SPECULATIVE_STEP
    with_copy = [one for one in plan.chunks[: plan.workload.shadow_copies] if one.state == "host"]
    assert kept[:2] == [0, 0] and set(kept[2:]) == {len(with_copy)}
    assert 0 < plan.copied_elems < plan.host_elems and "shadow copies of " in str(plan)
    for engine in (wanted[2], found[2]):
        engine.close()


def test_what_cuda_takes_is_no_memory_of_a_plan_nor_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    device, free, reserved = torch.device("cuda", 0), [0], 20 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 64 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(device_limit, "channel_bytes", lambda: 3 * MiB)
    for taken, counted in ((1024, 1024), (100, 603), (9000, 1283)):  # a measurement; too little; another process
        free[0] = 44 * 2**30 - taken * MiB
        assert device_limit.outside_bytes(device) == counted * MiB
    assert device_limit.outside_bytes(torch.device("cpu")) == 0

    capped: list[int | None] = []
    real = residency_module.limit_allocator

    def noted(device: torch.device, limit: int | None) -> Any:
        capped.append(limit)
        return real(device, limit)

    monkeypatch.setattr(residency_module, "limit_allocator", noted)
    monkeypatch.setattr(measured_plans, "outside_bytes", lambda device: 2 * MiB)
    engine = trained(dict(gpu_memory_limit=12 * MiB), steps=3)[2]
    plan = residency(engine).plan
    assert plan is not None and capped[:2] == [None, 10 * MiB]
    assert plan.limits.gpu_bytes == int(10 * MiB * (1 - residency_module.ALLOCATOR_MARGIN))
    engine.close()


def test_steps_that_clip_are_not() -> None:
    engine = engine_of(dict(gpu_memory_limit=10 * MiB), clip_grad_norm=1e-3)
    generator = torch.Generator().manual_seed(0)
    with expecting(SPECULATIVE_STEP):
        for _ in range(4):
            engine.train_step(engine.shard_batch(torch.randint(128, (4, 16), generator=generator)))
    plan = residency(engine).plan
    assert plan is not None and plan.workload.strategies == (SPLIT_STEP,)
    engine.close()


def test_copies_are_no_reason_to_fill_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has said how much is to be used, as much again as they take must be left."""
    monkeypatch.setattr(measuring, "available_host_bytes", lambda: measuring.UNLIMITED_BYTES)
    monkeypatch.setattr(measured_plans, "free_host_bytes", lambda: 2**40)
    measuring._rates.cache_clear()
    with expecting(SPECULATIVE_STEP):
        engine = trained(dict(gpu_memory_limit=10 * MiB), steps=3, clip_grad_norm=1e3)[2]
    plans, plan = residency(engine)._plans, residency(engine).plan
    assert plan is not None and plan.strategy == SPECULATIVE_STEP
    there = {chunk.name for chunk in plan.chunks if chunk.state == "host"}
    copies = 12 * sum(cost.elems for cost in plan.workload.chunks if cost.name in there)
    for free in (2 * copies, 2 * copies - 1):
        monkeypatch.setattr(measured_plans, "free_host_bytes", lambda free=free: free)
        assert plans._bytes_of_copies(plan) == copies and plans._room_for_copies(plan) == free // 2
        with expecting(SPECULATIVE_STEP):
            again = plans.plan(plan.workload, plan.machine, shrunk=0.0)
        if free == 2 * copies:
            assert again.strategy == SPECULATIVE_STEP and again.workload.shadow_copies is None
        else:  # as many as there is room for, if any
            assert plans._bytes_of_copies(again) <= free // 2
    for left in (copies, copies - 1):
        group = replace(plan.machine, host_bytes=plan.peak_host_bytes + left)
        assert plans._room_for_copies(replace(plan, machine=group)) == (copies + left) // 2
    engine.close()
    measuring._rates.cache_clear()


def test_a_run_that_stops_clipping_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first steps clip; after some that do not the steps are speculative, if that is faster."""
    monkeypatch.setattr(residency_module, "STEADY", 4)
    kept: list[int] = []
    losses: dict[bool, list[float]] = {}
    clip, bounds = Gemini.clip, iter([*[1e-3] * 4, *[1e3] * 10] * 2)
    monkeypatch.setattr(Gemini, "clip", lambda gemini, bound, kind: clip(gemini, next(bounds), kind))
    for speculative in (False, True):
        engine = engine_of(dict(gpu_memory_limit=10 * MiB), clip_grad_norm=1e-3)
        found = residency(engine)
        kept.clear()
        generator = torch.Generator().manual_seed(0)
        losses[speculative] = []
        monkeypatch.setattr(residency_module, "WORTH_MOVING", 1e9 if speculative else 0.0)
        with expecting(SPECULATIVE_STEP), kept_speculative(kept):
            for _ in range(14):
                ids = torch.randint(128, (4, 16), generator=generator)
                losses[speculative].append(engine.train_step(engine.shard_batch(ids)))
        plan = found.plan
        assert plan is not None and (plan.strategy == SPECULATIVE_STEP) == speculative
        assert (kept[-1] > 0) == speculative and not any(kept[:8])
        engine.close()
    assert losses[True] == losses[False]


def _host_limit() -> int:
    """What the processes have anyway, and the buffers of a disk."""
    return torch.distributed.get_world_size() * (PROCESS + 300 * MiB)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "tight", "every"),
    [
        (1, 5 * MiB, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 5 * MiB, 1), (2, 8 * MiB, 2), (2, 8 * MiB, 1))),
    ],
)
def test_limits_are_kept_and_bits_too(world: int, tight: int, every: int, tmp_path: Path) -> None:
    run_on_ranks(world, limits_are_kept, str(tmp_path), tight, every)


@ranks(1)
def test_the_least_that_is_named_is_enough() -> None:
    with pytest.raises(MemoryPlanError, match="at least") as refused:
        trained(dict(stage=3, gpu_memory_limit=1 * MiB))
    least = refused.value.minimum_gpu_bytes  # type: ignore[attr-defined]
    assert least is not None
    with pytest.raises(MemoryPlanError, match=f"it has to be at least {least:,} bytes"):
        trained(dict(stage=3, gpu_memory_limit=least - 1))
    losses, _, engine = trained(dict(stage=3, gpu_memory_limit=least))
    assert len(losses) == STEPS and places(engine) == {("host", "host")}
    engine.close()


@ranks(1)
def test_a_disk_that_is_too_small_for_making_do_is_told_with_the_plan_that_was_refused() -> None:
    full = DiskError("no space")
    with (
        mock.patch.object(Residency, "_can_make_do", True),  # as on a GPU
        mock.patch.object(Gemini, "move", side_effect=full),
        pytest.raises(DiskError, match="no space") as refused,
    ):
        trained(dict(stage=3, gpu_memory_limit=1 * MiB))
    assert any("at least" in note for note in refused.value.__notes__)


@ranks(1)
def test_the_disk_takes_what_the_host_does_not() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        wanted = trained(dict(stage=3, placement="cuda"))
        found = trained(dict(stage=3, placement="cpu", offload_path=folder))
        assert places(found[2]) == {("host", "disk")}
        assert list(Path(folder).iterdir())
        assert_same(found, wanted)
        for _, _, engine in (wanted, found):
            engine.close()
        assert not list(Path(folder).iterdir())


@ranks(1)
def test_every_placement_within_a_limit() -> None:
    wanted = trained(dict(stage=3, placement="cuda"))
    wanted[2].close()
    for zero in (
        dict(placement="const", gpu_memory_limit=6 * MiB),
        dict(placement="cpu", gpu_memory_limit=16 * MiB),
        dict(placement="static", offload_optim_frac=0.5, gpu_memory_limit=32 * MiB),
        dict(placement="cuda", gpu_memory_limit=64 * MiB),
    ):
        found = trained(zero)
        assert_same(found, wanted)
        assert residency(found[2]).plan is not None
        found[2].close()
    with pytest.raises(MemoryPlanError, match="placement 'cuda'"):
        trained(dict(placement="cuda", gpu_memory_limit=4 * MiB))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [dict(gradient_accumulation=2), dict(optimizer=dict(name="sgd", lr=0.1)), dict(precision="fp32")],
    ids=str,
)
@ranks(1)
def test_accumulation_and_single_precision_are_planned_too(settings: dict[str, Any]) -> None:
    wanted = trained(dict(stage=3, placement="cuda"), steps=8, **settings)
    found = trained(dict(stage=3, gpu_memory_limit=12 * MiB), steps=8, **settings)
    assert_same(found, wanted)
    assert residency(found[2]).plan is not None
    wanted[2].close()
    found[2].close()


@ranks(1)
def test_running_out_of_memory_is_no_end() -> None:
    """Once in the forward, once in the middle of the backward: the micro-step is done again, to the same bits."""
    wanted = trained(dict(stage=3, placement="cuda"))
    engine = engine_of(dict(stage=3))
    left, handles = [2], []

    def out_of_memory(*_: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    blocks = engine.model.blocks
    assert isinstance(blocks, torch.nn.ModuleList)
    blocks[2].register_forward_pre_hook(out_of_memory)
    generator, losses = torch.Generator().manual_seed(0), []
    gemini, tables = residency(engine)._gemini, []
    gemini.gather_by = lambda *table: tables.append((residency(engine).plan, table))  # type: ignore[method-assign]

    def train() -> None:
        for step in range(STEPS):
            if step == 3:
                left[0] = 10**6
                parameter = blocks[1].norm1.weight  # type: ignore[union-attr]
                handles.append(parameter.register_hook(lambda gradient: handles.pop().remove() or _raise()))
            ids = torch.randint(128, (4, 16), generator=generator)
            losses.append(engine.train_step(engine.shard_batch(ids)))

    with pytest.warns(UserWarning, match="more of .* chunks are kept off it"):
        train()
    assert ("device", "device") in places(engine) and ("host", "host") in places(engine)
    assert tables[0] == (None, ((), ()))  # before a plan: no units but the next are gathered ahead any more
    assert_same((losses, engine.full_state_dict(), engine), wanted)
    engine.close()
    wanted[2].close()


@ranks(1)
def test_a_plan_that_was_too_tight_is_made_again() -> None:
    wanted = trained(dict(stage=3, placement="cuda"))
    engine = engine_of(dict(stage=3, gpu_memory_limit=10 * MiB))
    blocks, handles = engine.model.blocks, []
    assert isinstance(blocks, torch.nn.ModuleList)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        ids = torch.randint(128, (4, 16), generator=generator)
        if step == 3:
            plan = residency(engine).plan
            assert plan is not None
            before = plan.limits.gpu_bytes, places(engine)
            handles.append(blocks[2].register_forward_pre_hook(lambda *_: handles.pop().remove() or _raise()))
            with pytest.warns(UserWarning, match="ran out of memory"):
                losses.append(engine.train_step(engine.shard_batch(ids)))
            plan = residency(engine).plan
            assert plan is not None and plan.limits.gpu_bytes < before[0]
        else:
            losses.append(engine.train_step(engine.shard_batch(ids)))
    assert_same((losses, engine.full_state_dict(), engine), wanted)
    engine.close()
    wanted[2].close()


def _raise() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@ranks(2)
def test_of_several_ranks_one_that_runs_out_says_what_to_change() -> None:
    engine = engine_of(dict(stage=3))
    blocks = engine.model.blocks
    assert isinstance(blocks, torch.nn.ModuleList)
    blocks[0].register_forward_pre_hook(lambda *_: _raise())
    with pytest.raises(torch.OutOfMemoryError) as raised:
        engine.train_step(engine.shard_batch(torch.zeros(4, 16, dtype=torch.int64)))
    assert "gpu_memory_limit" in "".join(raised.value.__notes__)
    engine.close()


def waits_are_watched() -> None:
    """Moments are stepped when a backward waits for them, which takes a while; the watched backward takes it off."""
    wanted, took = threading.Event(), 0.05
    wait, step = Worker.wait_moments, runs.adam_update_moments

    def waiting(worker: Worker, chunk: Chunk) -> None:
        wanted.set()
        wait(worker, chunk)
        wanted.clear()

    def late(*args: Any, **settings: Any) -> None:
        wanted.wait()
        time.sleep(took)
        step(*args, **settings)

    with (
        mock.patch.object(Worker, "wait_moments", waiting),
        mock.patch.object(runs, "adam_update_moments", late),
    ):
        _, _, engine = trained(dict(stage=3, gpu_memory_limit=10 * MiB), steps=2)
        states = engine.states
        assert isinstance(states, ZeroStates)
        first, second = states.residency._watcher.traces
        assert sum(one.stalled_seconds for one in second.timesteps if one.backward) >= took
        assert all(one.stalled_seconds == 0.0 for one in second.timesteps if not one.backward)
        assert first.order == second.order and not states.gemini.memory.waiting.is_watched
        engine.close()


def test_what_a_watched_backward_waits_for_is_no_compute() -> None:
    run_on_ranks(1, waits_are_watched)
