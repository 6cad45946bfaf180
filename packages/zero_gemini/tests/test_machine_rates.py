"""The rates that plans are made from: a sample that has warmed up, the model's own kernels, and what steps showed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from planner_cases import EMULATED, stack
from stepping_cases import SHAPES, Small, adam

from meshfold.mesh import Group
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.machine_rates import host_in_use
from meshfold.zero_gemini.machine_rates import samples as measuring
from meshfold.zero_gemini.machine_rates.observed import ENOUGH_ELEMS, with_observed_rates
from meshfold.zero_gemini.memory.arena import Arena, Memory
from meshfold.zero_gemini.memory.pinned import PAGE_BYTES, page_locked
from meshfold.zero_gemini.optimizer import AdamStepper
from meshfold.zero_gemini.optimizer import kernel_runs as timings
from meshfold.zero_gemini.optimizer.gpu_streaming import GpuStreaming
from meshfold.zero_gemini.optimizer.kernel_runs import StepKind, StepTimer, StepTiming
from meshfold.zero_gemini.planner import H200, REGIMES, Machine
from meshfold.zero_gemini.planner.options import HOST_STREAMED, SPLIT_STEP, Choice
from meshfold.zero_gemini.planner.seconds import seconds_table

HOST = ChunkPlacement(parameters="host", state="host")


class Clock:
    """Time that passes only when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measuring, "time", made)
    monkeypatch.setattr(timings, "time", made)
    return made


def test_a_sample_goes_on_until_nothing_is_faster(clock: Clock) -> None:
    took = iter([0.05, 0.04, 0.03, 0.02, 0.025, 0.025, 0.025, 0.025, 0.06, 0.06, 0.06, 0.001])
    done = []

    def work() -> int:
        clock.now += next(took)
        done.append(clock.now)
        return 100

    # The fourth is the best; 0.16 s later it still is, and the last is not waited for.
    assert measuring._steady(work) == pytest.approx(100 / 0.02)
    assert len(done) == 9


def test_a_sample_that_keeps_getting_faster_ends(clock: Clock) -> None:
    calls = 0

    def work() -> int:
        nonlocal calls
        calls += 1
        clock.now += 0.1
        return calls

    assert measuring._steady(work) == pytest.approx(calls / 0.1)
    assert calls == 15


@pytest.mark.parametrize("regime", sorted(REGIMES))
def test_every_regime_is_measured_with_its_own_planes(regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_ELEMENTS", 2**16)
    allocated: list[int] = []
    make = Arena.allocate

    def allocate(arena: Arena, numel: int, dtype: torch.dtype, purpose: str = "") -> object:
        allocated.append(numel * dtype.itemsize)
        return make(arena, numel, dtype, purpose)

    monkeypatch.setattr(Arena, "allocate", allocate)
    known = REGIMES[regime]
    assert measuring._adam(torch.device("cpu"), known) > 0
    assert sum(allocated) == pytest.approx((known.parameter + known.state + known.gradient) * 2**16)


def test_a_host_that_becomes_slower_does_not_hide_what_the_device_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores alone, and beside the device, by turns: each round is slower than the one before, and one is disturbed."""
    regime, now, fed, rounds = REGIMES["A"], 0.0, False, 0
    passed = 0.0

    class Sample:
        def __init__(self, *_: object) -> None: ...

        def half(self) -> float:
            nonlocal now, passed
            now += 0.01
            speed = 1e9 * 0.8**rounds * (0.3 if fed and rounds == 2 else 1.0)
            passed += (
                0.01 * 0.7 * speed * regime.step / regime.first_pass * fed
            )  # of elements, 0.7 of what the cores did
            return 0.01 * speed * (0.6 if fed else 1.0)

        def through(self, _: object) -> object:
            return lambda: None

        def free(self) -> None: ...

        @property
        def passed(self) -> float:
            return passed / regime.step

    class Pool:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, *_: object) -> Pool:
            nonlocal fed
            fed = True
            return self

        def result(self) -> None:
            nonlocal fed, rounds
            fed, rounds = False, rounds + 1

    class Streaming:
        def __init__(self, **_: object) -> None: ...

        def close(self) -> None: ...

    for name, fake in (("HostSample", Sample), ("ThreadPoolExecutor", Pool), ("GpuStreaming", Streaming)):
        monkeypatch.setattr(measuring, name, fake)
    monkeypatch.setattr(measuring, "synchronize", lambda device: None)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now)
    alone, beside = measuring._with_device(torch.device("cpu"), regime)
    assert rounds == 5
    assert beside.gain(alone, regime) == pytest.approx(1.3)


def test_what_has_no_kernels_is_measured_with_those_of_regime_a() -> None:
    assert [measuring._known(name) for name in ("B", "fp32", "3 moments")] == ["B", "fp32", "A"]


def test_a_host_that_does_not_matter_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples lock GiBs of memory, which takes seconds."""

    def refuse(*_: object) -> None:
        raise AssertionError("the host was measured")

    for name in ("_adam", "_with_device", "_copies"):
        monkeypatch.setattr(measuring, name, refuse)
    monkeypatch.setattr(measuring, "_gpu_memory", lambda device: 123.0)
    monkeypatch.setattr(measuring, "_name", lambda device: "a GPU")
    alone = Group(axes=(), ranks=(0,), index=0, name="")
    found = measuring.measure_machine(torch.device("cuda", 7), everyone=alone, host=False)
    assert found.gpu_memory == 123.0 and found.h2d == H200.h2d
    with pytest.raises(AssertionError, match="the host was measured"):
        measuring.measure_machine(torch.device("cuda", 7), everyone=alone)


def test_equally_large_blocks_begin_on_different_pages() -> None:
    """Else the planes of a chunk of 2**26 elements lie whole powers of two apart."""
    blocks = [page_locked(2**21 * times) for times in (1, 2, 2, 1, 1)]
    places = [block.data_ptr() // PAGE_BYTES % 16 for block in blocks]
    assert len(set(places)) == 5
    assert all(block.data_ptr() % PAGE_BYTES == 0 for block in blocks)
    assert [block.untyped_storage().nbytes() for block in blocks] == [2**21 * t for t in (1, 2, 2, 1, 1)]


def test_paces_add_up_and_begin_anew(clock: Clock) -> None:
    found = StepTimer()
    for elements, seconds in ((100, 2.0), (300, 1.0)):
        with found.clock("moments", elements):
            clock.now += seconds
    with pytest.raises(ValueError, match="no"), found.clock("whole", 5):
        raise ValueError("no")
    assert found.take() == {"moments": StepTiming(400, 3.0)}
    assert found.take() == {}


@pytest.mark.parametrize("through", [False, True], ids=["cores", "device"])
def test_steps_on_the_host_are_clocked_by_what_they_do(through: bool) -> None:
    small = Small(adam("A"), torch.bfloat16, (HOST, ChunkPlacement(), HOST))
    stepper = small.stepper
    assert isinstance(stepper, AdamStepper)
    if through:
        stepper.stream_on_gpu(GpuStreaming(memory=small.memory, slot_bytes=2**20, slots=2))
    for _ in range(3):
        small.step("".join(SHAPES))
    small.stepper.finish()
    found = stepper.timings.take()
    small.stepper.close()
    on_host = sum(chunk.spec.size_elems for chunk in (small.chunks[0], small.chunks[2]))
    passed = found.get("GPU streaming", StepTiming()).elements
    assert (passed > 0) <= through
    # each chunk's parameters and moments by the cores, or all of it by the device; none of the device's own
    for half in ("parameters", "moments"):
        assert found.get(half, StepTiming()).elements + passed == 3 * on_host
    assert all(timing.seconds > 0 for timing in found.values())


def test_a_plan_takes_the_rates_that_steps_showed() -> None:
    regime, n = REGIMES["A"], ENOUGH_ELEMS
    machine = replace(EMULATED, gpu_streaming=5e9, host_memory_while_streaming=6e9)
    seen = with_observed_rates(machine, regime, {"parameters": StepTiming(n, 1.0), "moments": StepTiming(n, 99.0)})
    assert seen.host_memory == pytest.approx((18 + 2) * n)  # with the parameters that go up
    assert seen.host_memory_while_streaming / machine.host_memory_while_streaming == pytest.approx(
        seen.host_memory / machine.host_memory
    )
    assert seen.moments_memory == pytest.approx((18 + 2 + 2) * n / 99.0)  # with the gradients that come down as well
    assert (
        replace(seen, host_memory=machine.host_memory, host_memory_while_streaming=6e9, moments_memory=0.0) == machine
    )
    whole = with_observed_rates(machine, regime, {"whole": StepTiming(3 * n, 2.0), "parameters": StepTiming(n, 1.0)})
    assert whole.host_memory == pytest.approx((30 * 3 * n + 20 * n) / 3)
    assert whole.moments_memory == 0.0


def test_what_passes_through_the_device_is_as_fast_as_its_steps_showed() -> None:
    """Cores and device share the memory: neither's rate says anything of the other, or of steps without GPU streaming."""
    regime, n = REGIMES["A"], ENOUGH_ELEMS
    machine = replace(EMULATED, gpu_streaming=5e9, host_memory_while_streaming=6e9)
    took: dict[StepKind, StepTiming] = {
        "parameters": StepTiming(4 * n, 2.0),
        "GPU streaming": StepTiming(n, 3.0),
        "moments": StepTiming(n, 1.0),
    }
    found = with_observed_rates(machine, regime, took, passed=26.0)
    assert found.host_memory_while_streaming == pytest.approx(18 * 4 * n / 2.0)
    assert found.gpu_streaming == pytest.approx(26 * n / 3.0)
    assert found.moments_memory == pytest.approx(22 * n)
    assert replace(found, gpu_streaming=5e9, host_memory_while_streaming=6e9, moments_memory=0.0) == machine
    cores = with_observed_rates(machine, regime, {**took, "GPU streaming": StepTiming(n - 1, 3.0)}, passed=26.0)
    assert replace(cores, moments_memory=0.0) == machine


def test_into_second_copies_the_cores_are_as_fast_as_seen() -> None:
    regime, n = REGIMES["A"], ENOUGH_ELEMS
    took: dict[StepKind, StepTiming] = {"second copy": StepTiming(n, 2.0), "GPU streaming": StepTiming(n, 1.0)}
    both = with_observed_rates(
        replace(EMULATED, gpu_streaming=5e9, host_memory_while_streaming=6e9), regime, took, passed=26.0
    )
    assert (both.host_memory_while_streaming, both.gpu_streaming) == (
        pytest.approx(26 * n / 2.0),
        pytest.approx(26 * n),
    )
    assert with_observed_rates(EMULATED, regime, took).host_memory == pytest.approx((26 + 4) * n / 2.0)


def test_a_disk_is_as_fast_as_the_steps_of_what_is_on_it() -> None:
    regime, n = REGIMES["A"], 2 * ENOUGH_ELEMS
    found = with_observed_rates(EMULATED, regime, {"disk": StepTiming(n, 7.0)})
    assert 10 * n / found.disk_read + 10 * n / found.disk_write == pytest.approx(7.0)
    assert found.disk_read / found.disk_write == pytest.approx(EMULATED.disk_read / EMULATED.disk_write)
    same = replace(found, disk_read=EMULATED.disk_read, disk_write=EMULATED.disk_write)
    assert same == EMULATED
    twice = with_observed_rates(EMULATED, replace(regime, disk_reads=2), {"disk": StepTiming(n, 7.0)})
    assert 20 * n / twice.disk_read + 10 * n / twice.disk_write == pytest.approx(7.0)


def test_cores_and_device_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They give their memory back."""
    monkeypatch.setattr(measuring, "_ELEMENTS", 2**16)
    monkeypatch.setattr(measuring, "_PERIOD_S", 0.1)  # the thread that feeds the device needs a turn in three of five
    device, regime = torch.device("cpu"), REGIMES["A"]
    made: list[Memory] = []

    def memory(device: torch.device) -> Memory:
        made.append(Memory(device))
        return made[-1]

    monkeypatch.setattr(measuring, "Memory", memory)
    alone, beside = measuring._with_device(device, regime)
    assert alone > 0 and beside.device > 0 and beside.cores > 0
    assert made[0].compute.used_bytes == made[0].host_arena.used_bytes == 0


def test_moments_are_hidden_as_fast_as_they_were_seen() -> None:
    """The host memory of a backward, and of nothing else, has the rate of moments where that is known."""
    machine = replace(EMULATED, cpu_optimizer={})
    work = stack(machine=machine, layers=4, layer_elems=2**20, tokens=64)
    host = Choice(chunks=np.full(4, HOST_STREAMED), layers=np.zeros(4, dtype=int))

    def seconds(machine: Machine) -> list[tuple[str, float]]:
        table, phases = seconds_table(work, machine, SPLIT_STEP)
        rows = table.at(host)
        return [
            (f"{phase.name} {table.names[row]}", float(rows[row]))
            for phase in phases
            for row in range(phase.start, phase.stop)
        ]

    before, after = seconds(machine), seconds(replace(machine, moments_memory=2 * machine.host_memory))
    changed = [(name, was / now) for (name, was), (_, now) in zip(before, after, strict=True) if was != now]
    assert changed == [("backward host memory", pytest.approx(2.0))]


@pytest.mark.parametrize(
    "few",
    [{}, {"parameters": StepTiming(ENOUGH_ELEMS - 1, 1e-3)}, {"moments": StepTiming(ENOUGH_ELEMS - 1, 1e-3)}],
    ids=["none", "few", "few moments"],
)
def test_a_few_elements_say_nothing_of_the_memory(few: dict[StepKind, StepTiming]) -> None:
    assert with_observed_rates(EMULATED, REGIMES["A"], few) is EMULATED


def test_a_host_in_use_is_measured_by_all_bytes_and_the_time_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pass that warms up, chunks are stepped in turn; everything is freed, and the cores are those of before."""
    monkeypatch.setattr(measuring, "_ELEMENTS", 2**16)
    monkeypatch.setattr(host_in_use, "_CHUNKS", 2)
    monkeypatch.setattr(host_in_use, "_LEAST_S", 0.0)
    made = Clock()
    monkeypatch.setattr(host_in_use, "time", made)
    done: list[str] = []

    def kernel(name: str, seconds: float) -> Callable[..., None]:
        def run(*_: object, **__: object) -> None:
            done.append(name)
            made.now += seconds

        return run

    monkeypatch.setattr(host_in_use, "adam_update_parameters", kernel("parameters", 0.5))
    monkeypatch.setattr(host_in_use, "adam_update_moments", kernel("moments", 0.25))
    monkeypatch.setattr(host_in_use, "synchronize", lambda device: setattr(made, "now", made.now + 100.0))
    threads = torch.get_num_threads()
    found = host_in_use.measure_host_in_use(torch.device("cpu"))
    assert done == ["parameters"] * 4 + ["moments"] * 4  # one pass warms up, one is timed
    assert found.parameters == pytest.approx(18 * 2**16 / 0.5) and found.moments == pytest.approx(18 * 2**16 / 0.25)
    assert torch.get_num_threads() == threads


def test_a_host_in_use_is_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_ELEMENTS", 2**16)
    monkeypatch.setattr(host_in_use, "_CHUNKS", 2)
    monkeypatch.setattr(host_in_use, "_LEAST_S", 0.001)
    found = host_in_use.measure_host_in_use(torch.device("cpu"))
    assert found.parameters > 0 and found.moments > 0
