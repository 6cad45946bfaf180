"""Under ``pipeline`` every stage has a plan of its own: what its ranks saw of it, within the limits, or no plan for any."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from meshfold.engine import Engine
from meshfold.engine.zero.measured_plans import InFlight, MeasuredPlans, workload_in_flight
from meshfold.engine.zero.stage_refusals import Refused, refusal_of_stages
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh.model_io import ATTENTION_OF
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.zero_gemini import Gemini, MemoryPlanError
from meshfold.zero_gemini.chunks import parameter_table as members
from meshfold.zero_gemini.planner import REGIMES, DoesNotFit, Machine, Workload
from meshfold.zero_gemini.planner.memory import layer_bytes
from meshfold.zero_gemini.profiler import ChunkUse, Trace, TracedLayer, TracedTimestep, workload_of

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from pipeline_cases import assert_same, batches, engine_of, run, train

KiB = 2**10


def staged(schedule: str = "1f1b", **zero: Any) -> dict[str, Any]:
    return dict(data=2, pipeline=dict(size=2, schedule=schedule, microbatches=4), zero=dict(stage=3, **zero))


def made(parallel: dict[str, Any], model: str, **settings: Any) -> Engine:
    least, members.LEAST_ELEMS = members.LEAST_ELEMS, 2**9
    try:
        return engine_of(parallel, model, **settings)
    finally:
        members.LEAST_ELEMS = least


def gemini_of(engine: Engine) -> Gemini:
    assert isinstance(engine.states, ZeroStates)
    return engine.states.gemini


def planned(parallel: dict[str, Any], model: str, given: list[dict[str, Tensor]], **settings: Any) -> Any:
    """What was seen, the model afterwards, and where this rank's chunks are."""
    with made(parallel, model, **settings) as engine:
        seen = train(engine, given)
        assert engine.residency is not None and engine.residency.plan is not None
        plan, gemini = engine.residency.plan, gemini_of(engine)
        state = [(placement.parameters, placement.state) for placement in gemini.placements.values()]
        most = plan.limits.gpu_bytes
        words = dict(
            pipe=engine.mesh.index("pipe"),
            placements=state,
            peak=plan.peak_gpu_bytes,
            most=most,
            kept=[layer.name for layer in plan.layers if layer.kept],
            accumulation=plan.workload.accumulation,
            non_model=plan.workload.non_model_bytes,
        )
        return (seen, engine.full_state_dict()), words


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_every_stage_is_planned_and_training_is_that_of_one_process(schedule: str) -> None:
    given = batches(3)
    wanted = run({}, "dropping", given)
    parallel = staged(schedule, gpu_memory_limit="280KiB")
    found = run_on_ranks(4, planned, parallel, "dropping", given)
    for seen, _ in found:
        assert_same(seen, wanted, schedule)
    by_stage = {words["pipe"]: words for _, words in found}
    for _, words in found:
        assert words == by_stage[words["pipe"]]  # the ranks of a stage agree
        assert words["peak"] <= words["most"] <= 280 * KiB
        assert words["accumulation"] == 4
    away = [place for words in by_stage.values() for placement in words["placements"] for place in placement]
    assert "host" in away  # not everything fits


@contextmanager
def made_up(seed: int) -> Iterator[None]:
    """Let plans be made of seconds and rates that nobody measured: plans that this machine would hardly come to."""
    found = MeasuredPlans.problem

    def problem(self: MeasuredPlans, *given: Any) -> tuple[Workload, Machine]:
        workload, machine = found(self, *given)
        draw = random.Random(seed)

        def scale() -> float:
            return float(10 ** draw.uniform(-2, 2))

        chunks = tuple(
            replace(chunk, forward_seconds=1e-3 * scale(), backward_seconds=2e-3 * scale()) for chunk in workload.chunks
        )
        rates = {name: 1e7 * scale() for name in ("host_memory", "h2d", "d2h", "pcie_both")}
        return replace(workload, chunks=chunks), replace(machine, gpu_memory=1e9 * scale(), gpu_streaming=0.0, **rates)

    with mock.patch.object(MeasuredPlans, "problem", problem):
        yield


@pytest.mark.parametrize(
    ("schedule", "seeds"),
    [
        pytest.param("1f1b", (1, 7), marks=pytest.mark.slow),
        *(pytest.param(name, (1, 3, 6, 7), marks=pytest.mark.slow) for name in ("1f1b", "zb-v")),
    ],
    ids=str,
)
@ranks(4)
def test_limits_are_kept_under_plans_of_any_rates(schedule: str, seeds: tuple[int, ...]) -> None:
    """Also by the chunks that stay gathered in what a step has left: arenas refuse what is beyond a limit."""
    given, places, seen = batches(5), set(), []
    for seed in seeds:
        with made_up(seed), made(staged(schedule, gpu_memory_limit="280KiB"), "dropping") as engine:
            seen.append(train(engine, given))
            places.add(tuple(gemini_of(engine).placements.values()))
    assert len(places) > 1 and all(losses == seen[0] for losses in seen)


def test_activations_of_all_micro_batches_under_way_are_counted() -> None:
    """1F1B's first rank holds two micro-batches at a time, its last one: GPipe's hold all four."""
    given = batches(2)
    most = {}
    for schedule in ("1f1b", "gpipe"):
        for _, words in run_on_ranks(4, planned, staged(schedule, gpu_memory_limit="1MiB"), "dropping", given):
            most[schedule, words["pipe"]] = max(words["non_model"])
    assert most["gpipe", 0] > 1.4 * most["1f1b", 0]
    assert most["gpipe", 1] > 1.8 * most["1f1b", 1]


def test_blocks_keep_their_activations_where_they_fit() -> None:
    given = batches(3)
    wanted = run({}, "dropping", given)
    parallel = staged(gpu_memory_limit="100MiB")
    for seen, words in run_on_ranks(4, planned, parallel, "dropping", given, recompute="auto"):
        assert_same(seen, wanted, "recompute")
        # Both blocks of a stage. Where attention's seconds are dear for their bytes, it is counted apart, and kept too.
        blocks = [name for name in words["kept"] if not name.startswith(ATTENTION_OF)]
        assert len(blocks) == 2


@ranks(4)
def test_what_no_plan_can_keep_stops_all_stages() -> None:
    given = batches(3)
    with (
        made(staged(gpu_memory_limit="140KiB"), "dropping") as engine,
        pytest.raises(MemoryPlanError, match=r"rank \d of the pipeline") as refused,
    ):
        train(engine, given)
    # The least that it names is enough for every stage: the least of one alone need not be.
    least = refused.value.minimum_gpu_bytes  # type: ignore[attr-defined]
    assert least > 140 * 2**10
    with made(staged(gpu_memory_limit=least), "dropping") as engine:
        train(engine, given)


def test_refusals_of_stages_name_what_is_enough_for_all() -> None:
    def refused(rank: int, gpu: int | None, host: int | None = 5) -> Refused:
        return Refused.of(DoesNotFit(f"needs {gpu}", gpu=gpu, host=host, binds="gpu"), rank)

    found = refusal_of_stages([refused(0, 70), refused(1, 90), refused(1, 90), refused(3, 80, 9)])
    assert isinstance(found, DoesNotFit) and (found.minimum_gpu_bytes, found.minimum_host_bytes) == (90, 9)
    assert str(found) == "rank 1 of the pipeline: needs 90 Ranks 0, 3 of the pipeline refused too, and need no more."
    hopeless = refusal_of_stages([refused(0, 70), refused(2, None, None)])
    assert isinstance(hopeless, DoesNotFit) and hopeless.minimum_gpu_bytes is hopeless.minimum_host_bytes is None
    assert str(hopeless) == "rank 2 of the pipeline: needs None Rank 0 of the pipeline refused too."
    other = refusal_of_stages([Refused.of(MemoryPlanError("no"), 1)])
    assert type(other) is MemoryPlanError and str(other) == "rank 1 of the pipeline: no"


@ranks(4)
def test_a_static_placement_is_compared_with_its_limit() -> None:
    """Chunks live where they were told to; the limit is looked at after two steps."""
    parallel = staged(placement="cuda", gpu_memory_limit="64KiB")
    with made(parallel, "dropping") as engine, pytest.raises(MemoryPlanError, match="of GPU memory"):
        train(engine, batches(3))


def on_disk(parallel: dict[str, Any], folder: str, given: list[dict[str, Tensor]]) -> Any:
    if folder:
        parallel = {**parallel, "zero": {**parallel["zero"], "offload_path": folder}}
    with made(parallel, "tied", precision="fp32") as engine:
        losses = train(engine, given)
        files = [path for path in Path(folder).rglob("*") if path.is_file()] if folder else []
        states = {placement.state for placement in gemini_of(engine).placements.values()} if parallel else set()
        return (losses, engine.full_state_dict()), states, len(files)


@pytest.mark.slow  # compiles the host's kernels
def test_state_on_a_disk(tmp_path: Path) -> None:
    given = batches(3)
    wanted, _, _ = on_disk({}, "", given)
    parallel = staged("zb-h1", placement="cpu")
    for rank in run_on_ranks(4, on_disk, parallel, str(tmp_path), given):
        found, states, files = rank
        assert states == {"disk"} and files >= 1
        assert_same(found, wanted, "disk", 1e-4)


def test_kept_layers_of_micro_batches_in_flight_count_in_every_timestep() -> None:
    """Of the one that runs its forward 50 of 60 bytes are in that timestep already; of the two others all of them are added."""

    def timestep(unit: str, *, backward: bool) -> TracedTimestep:
        bytes_ = dict(non_model_bytes=100, left_bytes=40)
        return TracedTimestep(
            unit=unit, backward=backward, until=int(backward), seconds=1.0, waited_seconds=0.0, **bytes_
        )

    layer = TracedLayer(
        name="a", kept_bytes=60, seconds=0.5, first=0, last=0, before_bytes=100, entered_bytes=30, forward_bytes=70
    )
    trace = Trace(timesteps=(timestep("a", backward=False), timestep("a", backward=True)), layers=(layer,))
    chunk = ChunkUse(name="x", elems=8, gathered_elems=8, units={"a": 8})
    one = workload_of(trace, [chunk], name="it", regime=REGIMES["A"], tokens=8)
    flying = workload_in_flight(one, trace, InFlight(stages=1, live=3, microbatches=4))
    assert layer_bytes(one)[0, 1, 0] == 10
    assert layer_bytes(flying)[0, 1, 0] == 10 + 2 * 60
    assert one.in_order and not flying.in_order
