"""What a plan says of a pipeline is what a real step sends, holds and keeps."""

from __future__ import annotations

import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.cli import main
from meshfold.engine import Engine, plan_memory
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh import Mesh, ParallelSpec, record
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import build
from meshfold.pipeline import simulate
from meshfold.pipeline.runtime import Stage
from meshfold.pipeline.runtime.executor import Peaks
from meshfold.planner import MACHINES, Estimate, Machine, estimate, step_speed, step_times
from meshfold.planner.efficiency import Efficiency, Launches
from meshfold.planner.pipeline_estimate import PipelineEstimate
from meshfold.planner.stage_costs import peak_beside_state

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
sys.path.append(str(Path(__file__).parents[2] / "engine" / "tests"))
from pipeline_cases import watched

SIZES: dict[str, Any] = dict(hidden=32, layers=4, heads=4, vocab_size=40, max_positions=16)
SPECS: dict[str, dict[str, Any]] = {
    "zb-h1": dict(data=2, pipeline=dict(size=2, schedule="zb-h1", microbatches=4)),
    "tensor": dict(tensor=2, pipeline=dict(size=2, schedule="1f1b", microbatches=2)),
    "zero 1": dict(data=2, pipeline=dict(size=2, schedule="interleaved", microbatches=2), zero=dict(stage=1)),
}


def llama() -> nn.Module:
    return build("llama-tiny", **SIZES, kv_heads=2, ffn=64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Perceptron(nn.Module):
    """Without attention, of which other kernels keep other things."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList([Layer() for _ in range(6)])
        self.head = nn.Linear(32, 40)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return {"loss": F.cross_entropy(logits, torch.flatten(labels[:, 1:]))}


def planned(parallel: dict[str, Any], model: Any = llama, *, ranks: int = 4, **settings: Any) -> Estimate:
    given: dict[str, Any] = dict(batch_size=8, seq_len=16, precision="bf16")
    return estimate(model, ParallelSpec.parse(parallel, ranks), **{**given, **settings})


def pipeline_of(found: Estimate) -> PipelineEstimate:
    assert found.pipeline is not None
    return found.pipeline


# -- what is sent and held --------------------------------------------------------------------------------------------


def real(parallel: dict[str, Any], precision: str, accumulate: int) -> dict[str, Any]:
    """Collectives that a real step hands over; bytes of parameters and the optimizer's state; where this rank stands."""
    settings: dict[str, Any] = dict(optimizer="adamw", precision=precision, gradient_accumulation=accumulate)
    batch = torch.randint(40, (8, 16), generator=torch.Generator().manual_seed(0))
    with Engine(llama, parallel, **settings) as engine:
        for _ in range(2):  # at the first step neighbours meet
            with record() as log:
                for part in batch.chunk(accumulate):
                    engine.train_step(engine.shard_batch(part))
        held = sum(p.numel() * p.element_size() for p in engine.model.parameters())
        assert engine.optimizer is not None and engine.pipeline is not None
        state = sum(
            t.numel() * t.element_size() for s in engine.optimizer.state.values() for t in s.values() if t.dim()
        )
        sent: dict[tuple[Any, ...], list[float]] = {}
        for entry in log.entries:
            line = sent.setdefault((entry.kind, *entry.axes), [0, 0.0])
            line[0], line[1] = line[0] + 1, line[1] + float(entry.bytes)
        return dict(
            sent=sent,
            held=held,
            state=state,
            pipe=engine.mesh.index("pipe"),
            data=engine.mesh.index("data"),
            live=engine.pipeline.peaks.microbatches,
        )


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "precision", "accumulate"), [("zb-h1", "bf16", 2), ("tensor", "fp32", 1)])
def test_a_real_step_sends_and_holds_what_was_planned(name: str, precision: str, accumulate: int) -> None:
    plan = planned(SPECS[name], precision=precision, accumulate=accumulate)
    pipeline = pipeline_of(plan)
    expected: dict[tuple[Any, ...], list[float]] = {}
    for entry in plan.traffic:
        line = expected.setdefault((entry.kind, *entry.axes), [0, 0.0])
        line[0], line[1] = line[0] + entry.calls, line[1] + entry.bytes
    ranks = run_on_ranks(4, real, SPECS[name], precision, accumulate)
    for rank in ranks:
        memory = pipeline.memory[rank["pipe"]]
        assert rank["live"] == pipeline.simulation.peak_microbatches[rank["pipe"]]
        assert (memory.parameters, memory.optimizer) == (rank["held"], rank["state"])
    found = next(rank for rank in ranks if rank["pipe"] == pipeline.fullest and rank["data"] == 0)["sent"]
    assert {key: calls for key, (calls, _) in found.items()} == {key: calls for key, (calls, _) in expected.items()}
    for key, (_, sent) in found.items():
        assert expected[key][1] == pytest.approx(sent, abs=8), key  # each line of a plan is rounded to bytes


def test_flops_are_those_of_the_model_shared_out() -> None:
    whole = planned({}, ranks=1)
    stages = pipeline_of(planned(dict(pipeline=dict(size=2, microbatches=4)), ranks=2)).stages
    assert 4 * sum(sum(stage.flops) for stage in stages) == whole.flops
    backward = [sum(stage.flops[1:]) / stage.flops[0] for stage in stages]
    assert all(2.0 <= one < 2.1 for one in backward)  # attention's scores are computed again


# -- what is kept -----------------------------------------------------------------------------------------------------


class Kept:
    """Bytes that wait for backward on this rank: what autograd has saved, what stages and queues hold."""

    def __init__(self, pipeline: Any, batch: dict[str, Tensor]) -> None:
        self.pipeline, self.most, self.alive = pipeline, 0, dict[int, int]()
        self.given = {t.untyped_storage()._cdata for t in (*pipeline.parameters(), *batch.values())}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)
        return tensor.detach()

    def see(self, stages: list[Stage]) -> None:
        found = dict(self.alive)
        held = [x for stage in stages for live in stage._held.values() for x in live.inputs]
        queued = [t for pairs in stages[0].queue._waiting.values() for _, pair in pairs for t in pair]
        for tensor in (*held, *queued):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
        own = {key: size for key, size in found.items() if key not in self.given}
        self.most = max(self.most, sum(own.values()))


def kept(parallel: dict[str, Any]) -> tuple[int, int]:
    batch = {"input_ids": torch.randint(40, (8, 16), generator=torch.Generator().manual_seed(0))}
    batch["labels"] = batch["input_ids"].clone()
    with Engine(Perceptron, parallel, optimizer="sgd") as engine:
        assert engine.pipeline is not None
        engine.train_step(batch)
        seen, record = Kept(engine.pipeline, batch), Peaks.record
        Peaks.record = lambda peaks, stages: (record(peaks, stages), seen.see(list(stages)))[0]  # type: ignore[method-assign]
        try:
            with torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda tensor: tensor):
                engine.train_step(batch)
        finally:
            Peaks.record = record  # type: ignore[method-assign]
        return engine.mesh.index("pipe"), seen.most


def kept_at_most(plan: PipelineEstimate, rank: int) -> int:
    """Return the most bytes that a rank keeps between two of its actions."""
    stages = [replace(stage, peaks=(0, 0, 0)) for stage in plan.stages]
    return peak_beside_state(plan.simulation.schedule.ranks[rank], stages, 0)[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "interleaved"])
def test_a_step_keeps_the_bytes_that_were_planned(schedule: str) -> None:
    """Between actions: activations from F to B, and what W still needs from B to W; logits on the last stage."""
    parallel = dict(pipeline=dict(size=2, schedule=schedule, microbatches=4))
    plan = pipeline_of(planned(parallel, Perceptron, ranks=2, precision="fp32"))
    for pipe, most in run_on_ranks(2, kept, parallel):
        expected = kept_at_most(plan, pipe)
        assert expected > 20_000
        # Scalars of layers, eight bytes each, are one for all micro-batches.
        assert 0 <= expected - most < 2_000, (pipe, most, expected)


def test_each_rank_keeps_its_schedules_peak() -> None:
    """1F1B's first rank holds as many micro-batches as there are ranks, GPipe's all."""
    one, all_ = (
        pipeline_of(planned(dict(pipeline=dict(size=4, schedule=name, microbatches=8)))) for name in ("1f1b", "gpipe")
    )
    assert one.simulation.peak_microbatches == (4, 3, 2, 1)
    assert kept_at_most(one, 1) == 3 * one.stages[1].activation_bytes
    assert kept_at_most(all_, 1) == 8 * one.stages[1].activation_bytes
    assert all_.memory[1].activations > 8 * one.stages[1].activation_bytes  # and what operators make


# -- the clock --------------------------------------------------------------------------------------------------------


def test_the_step_is_that_of_the_simulator_with_messages() -> None:
    parallel = dict(pipeline=dict(size=2, schedule="1f1b", microbatches=4))
    plan = planned(parallel, ranks=2, accumulate=2, machine=MACHINES["laptop"])
    found = pipeline_of(plan)
    link = MACHINES["laptop"]
    forward, backward, weight = ([stage.work[op].seconds(link, "bf16") for stage in found.stages] for op in range(3))
    send = link.latency + sum(found.stages[0].sent) / link.inside
    same = simulate(found.simulation.schedule, forward, backward, weight, send)
    assert found.simulation.makespan == pytest.approx(same.makespan)
    assert found.seconds == pytest.approx(2 * same.makespan)
    assert 0 < found.simulation.bubble < 1


def test_a_host_also_issues_what_stages_send() -> None:
    """A GPU that waits for its host waits for these calls too; one that is behind does not."""
    slow = replace(MACHINES["h200x8"], latency=0.5, collectives={}, launches=Launches.of_all(1.0))
    quick = replace(slow, launches=Launches.of_all(0.0), flops={"bf16": 1.0})
    spec = dict(pipeline=dict(size=4, schedule="1f1b", microbatches=4))
    mesh = Mesh({"pipe": 4}, rank=0)

    def seconds(machine: Machine, exchanged: int, number: int = 1) -> tuple[float, float, float]:
        return pipeline_of(found).stages[number].seconds(machine, mesh, "bf16", exchanged)

    found = planned(spec, machine=slow)
    more = [one - other for one, other in zip(seconds(slow, 2), seconds(slow, 0), strict=True)]
    assert more == pytest.approx([1.0, 1.0, 0.0])
    assert seconds(quick, 2) == seconds(quick, 0)
    on_cpu = replace(slow, kind="cpu")  # there other threads send
    assert seconds(on_cpu, 2) == seconds(on_cpu, 0)
    alone = simulate(
        pipeline_of(found).simulation.schedule,
        *([seconds(slow, 0, number)[op] for number in range(4)] for op in range(3)),
        slow.latency,
    )
    with_calls = simulate(
        pipeline_of(found).simulation.schedule,
        *([seconds(slow, 1 if number in (0, 3) else 2, number)[op] for number in range(4)] for op in range(3)),
        slow.latency,
    )
    assert pipeline_of(found).simulation.makespan == pytest.approx(with_calls.makespan, rel=1e-3)
    assert with_calls.makespan > alone.makespan


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_gradients_of_the_stage_that_ends_last_are_summed_after_the_schedule(schedule: str) -> None:
    hides_all = dict(collectives={}, efficiency=Efficiency())  # of the traffic that is not waited for
    machine = replace(MACHINES["h200x8"], latency=1.0, launches=Launches.of_all(0.0), **hides_all)
    found = planned(dict(data=2, pipeline=dict(size=2, schedule=schedule, microbatches=4)), machine=machine)
    sums = sum(entry.calls for entry in found.traffic if entry.phase == "gradients")
    stages = len(pipeline_of(found).stages) // 2
    times = step_times(found, machine, "bf16")
    assert stages == (1 if schedule == "1f1b" else 2)
    assert times.late == pytest.approx(sums / stages, rel=1e-3)
    expected = pipeline_of(found).seconds + times.late + times.optimizer
    assert step_speed(found, machine, "bf16").seconds == pytest.approx(expected)
    chunks = planned(dict(data=2, pipeline=dict(size=2, microbatches=4), zero=dict(stage=1)), machine=machine)
    gathers = sum(
        entry.calls for entry in chunks.traffic if entry.phase == "parameters"
    )  # gradients are in its own plan
    assert step_times(chunks, machine, "bf16").late == pytest.approx(gathers, rel=1e-3)
    whole = planned(dict(data=2), ranks=2, machine=machine)
    assert step_times(whole, machine, "bf16").late == 0


def test_auto_finds_an_order_for_these_costs() -> None:
    best = pipeline_of(planned(dict(pipeline=dict(size=2, schedule="auto", microbatches=4)), ranks=2))
    plain = pipeline_of(planned(dict(pipeline=dict(size=2, schedule="1f1b", microbatches=4)), ranks=2))
    assert best.simulation.makespan <= plain.simulation.makespan


def test_memory_alone_is_that_of_the_fullest_rank() -> None:
    parallel = dict(data=2, pipeline=dict(size=2, schedule="1f1b", microbatches=4))
    found = pipeline_of(planned(parallel))
    alone = plan_memory(llama, parallel, batch_size=8, seq_len=16, precision="bf16")
    assert alone == found.memory[found.fullest]
    assert alone.total == max(memory.total for memory in found.memory)


# -- zero -------------------------------------------------------------------------------------------------------------


def chunk_bytes(parallel: dict[str, Any]) -> tuple[int, int]:
    """The most bytes of chunks at once on a rank, in a step after the first."""
    batch = torch.randint(40, (8, 16), generator=torch.Generator().manual_seed(0))
    with Engine(llama, parallel, optimizer="adamw", precision="fp64", clip_grad_norm=1.0) as engine:
        assert isinstance(engine.states, ZeroStates)
        engine.train_step(engine.shard_batch(batch))
        engine.states.gemini.memory.compute.reset_peak()
        with watched(engine.states.gemini) as seen:
            engine.train_step(engine.shard_batch(batch))
        return engine.mesh.index("pipe"), max(seen)


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_chunks_take_what_was_planned(stage: int) -> None:
    parallel = dict(
        data=2,
        pipeline=dict(size=2, schedule="1f1b", microbatches=2),
        zero=dict(stage=stage, placement="cuda"),
    )
    plan = planned(parallel, precision="fp64")
    for pipe, most in run_on_ranks(4, chunk_bytes, parallel):
        memory = pipeline_of(plan).memory[pipe]
        assert most == pytest.approx(memory.total - memory.activations, rel=0.1), (pipe, memory)


def test_what_does_not_fit_is_refused_with_the_stage() -> None:
    parallel = dict(data=2, pipeline=2, zero=dict(stage=3, placement="cuda", gpu_memory_limit="66.2MiB"))
    found = planned(parallel)
    assert found.refusal.startswith("rank ") and pipeline_of(found).plans.count(None) >= 1


def test_what_is_off_the_device_counts_there() -> None:
    away = planned(dict(data=2, pipeline=2, zero=dict(stage=3, placement="cpu")))
    there = planned(dict(data=2, pipeline=2, zero=dict(stage=3, placement="cuda")))
    assert away.memory.optimizer == 0 < there.memory.optimizer
    assert away.memory.host > there.memory.host


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "plan.svg", tmp_path / "plan.json"
    words = [
        "plan",
        "--model",
        "gpt-tiny",
        "--batch-size",
        "8",
        "--seq-len",
        "32",
        "--parallel",
        "pipeline=2",
    ]
    assert main([*words, "--timeline", str(picture), "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    for part in (
        "a stage takes for a micro-batch",
        "micro-batches: ",
        "of the ranks' time is idle",
        "tokens/s",
    ):
        assert part in said
    assert "<svg" in picture.read_text() and "1F0" in picture.read_text()
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0F0", "1BW1", "thread_name"} <= names
    assert main([*words, "zero.stage=3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["pipeline"]["microbatches"] == 2 and len(answer["pipeline"]["stages"]) == 2
    assert answer["zero"]["placement"] == "auto"


@pytest.mark.parametrize("recompute", [None, "blocks"])
def test_utilisation_is_of_the_whole_pipeline(recompute: str | None) -> None:
    """Stages have unequal work; by the seconds and all ranks it is the FLOP of one rank without a pipeline."""

    def flop(parallel: dict[str, Any], **settings: int) -> float:
        spec = ParallelSpec.parse(parallel)
        found = estimate(llama, spec, batch_size=12, seq_len=16, recompute=recompute, **settings)  # type: ignore[arg-type]
        speed = step_speed(found, MACHINES["h100x8"], "bf16")
        return speed.mfu * speed.seconds * MACHINES["h100x8"].peak("bf16") * spec.world_size

    whole = flop({})
    assert flop(dict(pipeline=dict(size=3, microbatches=3)), accumulate=2) == pytest.approx(whole, rel=1e-6)
    assert flop(dict(data=2, pipeline=dict(size=2, schedule="zb-h1", microbatches=6))) == pytest.approx(whole, rel=1e-6)
