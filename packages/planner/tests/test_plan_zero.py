"""What a plan says of zero: chunks as in training, bytes within the limits, refusals that say the least that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshfold.cli import main
from meshfold.engine import Engine
from meshfold.engine.precision import Precision
from meshfold.engine.zero import DeviceLimit
from meshfold.engine.zero.plan import limits_of, regime_of
from meshfold.mesh import Mesh, ParallelSpec
from meshfold.mesh.spec import ZeroSpec
from meshfold.mesh.testing import ranks
from meshfold.models import build, preset
from meshfold.planner import MACHINES, Estimate, Machine, estimate, find_machine, step_speed, step_times
from meshfold.planner.report import memory_table
from meshfold.zero_gemini.machine_rates import ALLOCATOR_MARGIN
from meshfold.zero_gemini.planner import GiB, MiB, timeline

SIZES: dict[str, Any] = dict(hidden=64, layers=3, heads=4, vocab_size=96, max_positions=32)
SMALL = partial(build, "gpt-tiny", **SIZES)


def planned(
    zero: dict[str, Any], parallel: dict[str, Any] | None = None, model: Any = SMALL, **settings: Any
) -> Estimate:
    given: dict[str, Any] = {
        "batch_size": 8,
        "seq_len": 32,
        "precision": "bf16",
        "machine": find_machine("h200"),
    }
    spec = ParallelSpec.parse({**(parallel or {}), "zero": zero})
    return estimate(model, spec.with_world_size(spec.world_size), **{**given, **settings})


class Recomputed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Tensor:
        found: Tensor = checkpoint(self.block, *args, use_reentrant=False)
        return found


def opt(layers: int, hidden: int, heads: int) -> nn.Module:
    """As `benchmarks/zero_placements.py` builds it."""
    shape = preset("gpt2", layers=layers, hidden=hidden, heads=heads, vocab_size=50272, max_positions=1024, dropout=0.0)
    model = build(shape)
    model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("regime", ["A", "C"])
def test_chunks_are_those_of_training(regime: str) -> None:
    zero = dict(stage=3, placement="cpu", regime=regime)
    plan = planned(zero, precision="bf16").plan
    assert plan is not None
    engine = Engine(SMALL, {"zero": zero}, optimizer=dict(name="adamw", lr=1e-3), precision="bf16")
    chunks = engine.states.gemini.chunks  # type: ignore[attr-defined]
    assert sorted((c.name, c.elems) for c in plan.workload.chunks) == sorted(
        (c.spec.names[0], c.spec.shard_elems) for c in chunks
    )
    engine.close()


def test_timesteps_are_those_of_training() -> None:
    plan = planned(dict(stage=3, placement="cuda")).plan
    assert plan is not None
    engine = Engine(SMALL, {"zero": dict(stage=3, placement="cpu")}, optimizer="adamw", precision="bf16")
    batch = torch.randint(96, (8, 32), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        engine.train_step(batch)
    runtime = engine.states.gemini._runtime  # type: ignore[attr-defined]
    assert plan.workload.timesteps == len(runtime.order)
    engine.close()


WHOLE = dict(stage=1, placement="cuda")


@ranks(2)
def test_stage_1_holds_whole_gradients_between_micro_steps() -> None:
    engine = Engine(SMALL, dict(data=2, zero=WHOLE), optimizer="adamw", precision="bf16", gradient_accumulation=2)
    gemini, held = engine.states.gemini, []  # type: ignore[attr-defined]

    def look(*_: Any) -> None:
        wholes = [block for gradient in gemini._gradients.values() for block in gradient._whole.blocks]
        held.append(sum(whole.tensor.nbytes for whole in wholes))

    engine.model.register_forward_pre_hook(look)
    for seed in (0, 1):
        engine.train_step(engine.shard_batch(torch.randint(96, (8, 32), generator=torch.Generator().manual_seed(seed))))
    assert max(held) == 4 * sum(chunk.spec.size_elems for chunk in gemini.chunks)
    engine.close()


def test_a_plan_counts_these_gradients_and_sums_them_once() -> None:
    found = [planned(dict(WHOLE, stage=stage), dict(data=2), accumulate=2) for stage in (1, 2)]
    one, two = (each.plan for each in found)
    assert one is not None and two is not None
    whole = 4 * sum(chunk.gathered_elems for chunk in one.workload.chunks)
    assert all(timestep.kinds["gradients"] == whole for timestep in timeline(one))
    first, *others = (timestep.kinds["gradients"] for timestep in timeline(two)[: two.workload.forward_timesteps])
    assert first == 2 * whole  # the shard, and gradient and sum of the reduction that the micro-step before left
    assert all(held == whole // 2 for held in others)
    calls = [sum(sent.calls for sent in each.traffic if sent.kind == "reduce_scatter") for each in found]
    assert 2 * calls[0] == calls[1]
    later = [sum(seconds for name, _, seconds in plan.phases if name == "later backwards") for plan in (one, two)]
    assert later[0] <= later[1]


# Measured on one H200 (benchmarks/results/zero_placements.md): seconds, GPU GiB, host GiB.
MEASURED: dict[str, tuple[dict[str, Any], float, float, float]] = {
    "cuda": (dict(placement="cuda"), 1.421, 89.4, 1.2),
    "optimizer": (dict(placement="static", offload_optim_frac=1.0), 0.0, 25.9, 88.2),
    "cpu": (dict(placement="cpu"), 0.0, 13.9, 88.2),
    "cpu, C": (dict(placement="cpu", regime="C"), 0.0, 13.9, 51.2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MEASURED)
def test_predictions_are_near_what_was_measured(name: str) -> None:
    zero, seconds, gpu, host = MEASURED[name]
    found = planned(
        dict(stage=3, **zero), model=partial(opt, 32, 4096, 32), batch_size=16, seq_len=1024, kernels="off"
    )  # as it was measured
    assert found.plan is not None, found.refusal
    assert found.plan.peak_gpu_bytes / GiB == pytest.approx(gpu, rel=0.05)
    assert found.plan.peak_host_bytes / GiB == pytest.approx(host, rel=0.05)
    if seconds:
        assert found.plan.seconds == pytest.approx(seconds, rel=0.15)


def test_activation_checkpointing_is_seen() -> None:
    whole = planned(dict(placement="cuda"))
    again = planned(dict(placement="cuda"), model=partial(opt, 2, 128, 4), batch_size=2, seq_len=64)
    plain = planned(
        dict(placement="cuda"),
        model=lambda: build(
            preset("gpt2", layers=2, hidden=128, heads=4, vocab_size=50272, max_positions=1024, dropout=0.0)
        ),
        batch_size=2,
        seq_len=64,
    )
    assert again.flops > plain.flops and again.memory.activations < plain.memory.activations
    assert whole.plan is not None and whole.plan.policy == "cuda"


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_share(stage: int) -> None:
    one = planned(dict(stage=stage, placement="cuda"))
    four = planned(dict(stage=stage, placement="cuda"), dict(data=4), machine=find_machine("h200x8"))
    assert one.plan is not None and four.plan is not None
    elems = one.plan.workload.elems
    assert four.plan.workload.elems == pytest.approx(elems / 4, rel=0.01)
    assert four.memory.optimizer == pytest.approx(one.memory.optimizer / 4, rel=0.01)
    if stage < 3:
        assert four.memory.parameters == pytest.approx(one.memory.parameters, rel=0.01)
    kinds = {(entry.phase, entry.kind): entry for entry in four.traffic if entry.ranks == 4}
    gathered, reduced = kinds["parameters", "all_gather"], kinds["gradients", "reduce_scatter"]
    whole = sum(chunk.gathered_elems for chunk in four.plan.workload.chunks)
    assert reduced.bytes == pytest.approx(4 * whole * 3 / 4)  # summed in float32
    assert gathered.bytes >= 2 * whole * 3 / 4
    if stage < 3:
        assert gathered.bytes == pytest.approx(2 * whole * 3 / 4)
    assert not [entry for entry in one.traffic if entry.ranks > 1]
    assert step_times(four, find_machine("h200x8"), "bf16").data > 0


def test_the_host_is_shared_by_its_ranks() -> None:
    one, four = (
        planned(dict(placement="cpu")),
        planned(dict(placement="cpu"), dict(data=4), machine=find_machine("h200x8")),
    )
    assert one.plan is not None and four.plan is not None
    process = one.plan.workload.host_base_bytes
    held = one.memory.host - process
    # all shards are on one host, and gradients are held in float32 instead of bfloat16
    assert four.memory.host - 4 * process == pytest.approx(held * (12 + 4) / (12 + 2), rel=0.01)
    assert four.plan.machine.host_memory == MACHINES["h200x8"].host.bandwidth / 4


def test_accumulation_takes_as_many_micro_steps() -> None:
    one, four = planned(dict(placement="cuda")), planned(dict(placement="cuda"), accumulate=4, batch_size=32)
    assert one.plan is not None and four.plan is not None
    assert four.flops == 4 * one.flops
    assert 3.0 * one.plan.seconds < four.plan.seconds < 4.5 * one.plan.seconds
    assert "later backwards (×3)" in str(four.plan)
    gradients = [four.memory.gradients, one.memory.gradients]
    assert gradients[0] > gradients[1]  # float32, and there from the first micro-step on


def test_tensor_axes_divide_what_chunks_hold() -> None:
    whole, half = (
        planned(dict(placement="cuda")),
        planned(dict(placement="cuda"), dict(tensor=2), machine=find_machine("h200x8")),
    )
    assert whole.plan is not None and half.plan is not None
    assert 0.45 < half.plan.workload.elems / whole.plan.workload.elems < 0.6
    assert any(entry.phase == "forward" and entry.axes == ("tensor",) for entry in half.traffic)


@pytest.mark.few(3)
@pytest.mark.parametrize("placement", ["auto", "cuda", "cpu", "static", "const"])
def test_every_placement_keeps_to_the_limits(placement: str) -> None:
    model = partial(opt, 6, 512, 8)
    roomy = planned(dict(placement="cpu"), model=model, batch_size=2, seq_len=256)
    limit = GiB + ceil((roomy.memory.total + 64 * MiB) / (1 - ALLOCATOR_MARGIN))  # CUDA's part, and gaps
    zero = dict(placement=placement, gpu_memory_limit=limit)
    if placement == "static":
        zero |= dict(offload_optim_frac=1.0, offload_param_frac=1.0)
    found = planned(zero, model=model, batch_size=2, seq_len=256)
    if placement == "cuda":
        assert found.plan is None and "needs" in found.refusal and "placement 'auto'" in found.refusal
        return
    assert found.plan is not None, found.refusal
    assert found.plan.peak_gpu_bytes <= DeviceLimit(bytes=limit, outside=GiB).plan_bytes
    assert found.memory.total == found.plan.peak_gpu_bytes


def test_a_limit_also_has_cuda_and_gaps_as_in_training() -> None:
    """Plans for 12 GiB filled all of it; the engine's could not, and kept everything on the host."""
    sizes = partial(opt, 6, 512, 8)
    refused = planned(dict(gpu_memory_limit="1GiB"), model=sizes, batch_size=2, seq_len=256).refusal
    assert "3% stay free for gaps between tensors, and 1.00 GiB for CUDA and push channels" in refused
    least = int(refused.split("it has to be at least ")[1].split(" bytes")[0].replace(",", ""))
    fitting = planned(dict(gpu_memory_limit=least), model=sizes, batch_size=2, seq_len=256)
    assert fitting.plan is not None and fitting.plan.peak_gpu_bytes <= (1 - ALLOCATOR_MARGIN) * (least - GiB)
    assert planned(dict(gpu_memory_limit=least - 2), model=sizes, batch_size=2, seq_len=256).plan is None
    cores = replace(find_machine("h200"), kind="cpu")  # no CUDA
    fitting = planned(dict(gpu_memory_limit=least - GiB), model=sizes, batch_size=2, seq_len=256, machine=cores)
    assert fitting.plan is not None, fitting.refusal


def test_a_host_whose_state_passes_through_devices_steps_faster() -> None:
    """Engines let devices step a part of the host's state where that is faster; plans did not know, and were 1.6 times too long."""
    slow, zero = find_machine("h200"), dict(placement="cpu")
    slow = replace(slow, host=replace(slow.host, stepping=4e10, moments=5e10))
    fast = replace(slow, host=replace(slow.host, streaming=7e10, stepping_while_streaming=3e10))
    alone, together = (planned(zero, machine=one).plan for one in (slow, fast))
    assert alone is not None and together is not None and together.seconds < 0.7 * alone.seconds
    assert (together.machine.gpu_streaming, together.machine.host_memory_while_streaming) == (7e10, 3e10)
    mesh = Mesh(dict(data=2), rank=0)
    share = fast.rates("bf16", mesh=mesh, axes=("data",), ranks=2)
    assert (share.gpu_streaming, share.host_memory_while_streaming) == (3.5e10, 1.5e10)
    narrow = replace(fast, host=replace(fast.host, both=1e10)).rates("bf16", mesh=mesh, axes=("data",), ranks=1)
    assert narrow.gpu_streaming == 1e10 and narrow.host_memory_while_streaming == pytest.approx(3e10 / 7)


def test_a_device_without_room_for_the_buffer_of_streaming_has_a_plan_without() -> None:
    """Streaming takes 192 MiB of the device: a host that is fast with it must not make a plan impossible."""
    sizes, slow = partial(opt, 6, 512, 8), find_machine("h200")
    fast = replace(slow, host=replace(slow.host, streaming=7e10, stepping_while_streaming=1e11))

    def found(limit: int, machine: Machine) -> Estimate:
        return planned(dict(gpu_memory_limit=limit), model=sizes, batch_size=2, seq_len=256, machine=machine)

    told = [found(GiB, machine).refusal.split("it has to be at least ")[1] for machine in (slow, fast)]
    assert told[0] == told[1]
    least = int(told[0].split(" bytes")[0].replace(",", ""))
    tight, roomy = (found(least + more, fast).plan for more in (0, 200 * MiB))
    assert tight is not None and not tight.machine.gpu_streaming and not tight.machine.streaming_bytes
    assert roomy is not None and roomy.machine.gpu_streaming == 7e10


def test_auto_stays_on_the_device_where_it_fits() -> None:
    plan = planned(dict(placement="auto")).plan
    assert plan is not None and plan.policy == "auto"
    assert {chunk.state for chunk in plan.chunks} == {"gpu"}


def test_the_disk_is_that_of_the_folder(tmp_path: Path) -> None:
    assert limits_of(ZeroSpec.parse({})).disk_bytes == 0
    assert limits_of(ZeroSpec.parse(dict(offload_path=tmp_path))).disk_bytes > 0  # type: ignore[operator]
    assert limits_of(ZeroSpec.parse(dict(offload_path=tmp_path / "later"))).disk_bytes is None
    model = partial(opt, 6, 1024, 8)
    tight = dict(placement="auto", gpu_memory_limit="1760MiB", host_memory_limit="2300MiB")
    without = planned(tight, model=model, batch_size=1, seq_len=64)
    assert without.plan is None and "host" in without.refusal
    found = planned({**tight, "offload_path": tmp_path}, model=model, batch_size=1, seq_len=64)
    assert found.plan is not None, found.refusal
    assert found.memory.disk > 0 and found.memory.host <= 2300 * MiB


def test_bytes_on_disk_are_those_of_the_optimizer(tmp_path: Path) -> None:
    """The masters of a model in bfloat16 beside Lion's number, LARS's one and LAMB's two; Adam's masters are half there."""
    tight = dict(gpu_memory_limit="1760MiB", host_memory_limit="2050MiB", offload_path=tmp_path)
    for optimizer, state, reads in (("adamw", 10, 1), ("lion", 8, 1), ("lars", 8, 2), ("lamb", 12, 2)):
        found = planned(
            tight, model=partial(opt, 6, 1024, 8), batch_size=1, seq_len=64, optimizer=optimizer, clip=False
        )
        assert found.plan is not None, found.refusal
        elements = {chunk.name: chunk.elems for chunk in found.plan.workload.chunks}
        away = sum(elements[chunk.name] for chunk in found.plan.chunks if chunk.state == "disk")
        assert found.memory.disk == state * away > 0
        assert (found.plan.workload.regime.state, found.plan.workload.regime.disk_reads) == (state, reads)
        assert found.plan.workload.clipping == (reads == 2), "optimizers of elements step chunk by chunk"


@pytest.mark.parametrize(
    ("precision", "regime", "moments", "held"),
    [
        ("bf16", "A", 2, 12),
        ("bf16", "B", 2, 8),
        ("bf16", "A", 0, 6),
        ("fp16", "A", 2, 14),
        ("fp32", "A", 2, 12),
        ("fp64", "A", 2, 24),
    ],
)
def test_bytes_of_regimes(precision: str, regime: str, moments: int, held: float) -> None:
    spec, wide = ZeroSpec.parse(dict(regime=regime)), Precision.parse(precision)
    found = regime_of(spec, wide, accumulation=1, ranks=1, moments=moments)
    assert found.parameter + found.state == held and found.gradient == wide.dtype.itemsize
    summed = regime_of(spec, wide, accumulation=2, ranks=1, moments=moments)
    assert summed.gradient == max(4, wide.dtype.itemsize)
    assert summed.step - found.step == summed.gradient - found.gradient


def test_rates_are_a_ranks_share_of_a_node() -> None:
    mesh = Mesh(dict(data=4), rank=0)
    for name, node in MACHINES.items():
        rates = node.rates("fp32", mesh=mesh, axes=("data",), ranks=min(4, node.devices))
        assert rates.host_memory <= node.host.bandwidth and rates.host_bytes == int(node.host.memory), name
    assert MACHINES["h200"].host.bandwidth == 141e9


def test_plan_in_words_pictures_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "gpt-small",
        "--batch-size",
        "4",
        "--parallel",
        "dict(zero=dict(placement='cpu'))",
    ]
    picture, trace = tmp_path / "plan.svg", tmp_path / "plan.json"
    assert main([*words, "--timeline", str(picture), "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "at its peak",
        "it fits",
        "gpt-small on h200",
        "policy cpu",
        "s a step",
        "exposed tail",
        "host",
    ):
        assert part in shown
    assert "<svg" in picture.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] and answer["zero"]["peak_gpu_bytes"] == answer["memory_bytes"]["total"]
    assert {chunk["state"] for chunk in answer["zero"]["chunks"]} == {"host"}


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "gpt-small", "--parallel", "dict(zero=dict(gpu_memory_limit='40MiB'))"]
    assert main([*words, "--json"]) == 1
    seen = capsys.readouterr()
    assert "does not fit" in seen.err and "at least" in seen.err
    assert not json.loads(seen.out)["fits"]
    assert main(["plan", "--model", "gpt-small", "--parallel", "dict(zero=dict())", "--gpu-memory", "64MiB"]) == 1
    assert "64.00 MiB" in capsys.readouterr().err
    assert main(["plan", "--model", "gpt-tiny", "--parallel", "{}", "--timeline", "x.svg"]) == 2
    assert "no zero" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--gpu-memory", "24 apples"])
    assert "amount of memory" in capsys.readouterr().err
    zero = "dict(zero=dict(stage=2, placement='static', offload_optim_frac=1.0, offload_param_frac=0.5))"
    assert main(["plan", "--model", "gpt-tiny", "--parallel", zero]) == 1
    assert "stage=3" in capsys.readouterr().err


def test_memory_table_says_where_the_rest_is() -> None:
    shown = memory_table(planned(dict(placement="cpu")))
    assert "host" in shown and "master weights" not in shown


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("parallel", "zero", "accumulate", "each"),
    [
        ({}, dict(stage=3), 1, 2 + 2),  # a process alone keeps them as they are
        (dict(data=2), dict(stage=3), 1, 2 + 4),
        (dict(data=2), dict(stage=1), 2, 2 * (2 + 2 * 4)),  # added to those of the micro-step before
        (dict(data=2), dict(stage=3, transport="push"), 1, 0),  # copy engines take them from where they are
    ],
)
def test_gradients_are_copied_into_their_chunks(
    parallel: dict[str, Any], zero: dict[str, Any], accumulate: int, each: int
) -> None:
    found = planned({**zero, "placement": "cuda"}, parallel, accumulate=accumulate)
    names = ("grad_pass.write_gradient", "aten._foreach_copy")
    copies = {
        one: count for one, count in found.work.operators.items() if one.name in names and one.phase == "backward"
    }
    assert sum(one.bytes * count for one, count in copies.items()) == each * found.local_parameters


def test_parameters_of_early_stages_are_gathered_when_no_compute_is_left() -> None:
    machine = replace(find_machine("h100x8"), latency=0.0)
    waited = [
        step_times(planned(dict(stage=stage), dict(data=2), machine=machine), machine, "bf16").late
        for stage in (1, 2, 3)
    ]
    found = planned(dict(stage=1), dict(data=2), machine=machine)
    gathered = sum(sent.bytes for sent in found.traffic if sent.phase == "parameters") / machine.inside
    assert waited == [pytest.approx(gathered), pytest.approx(gathered), 0.0]
    assert found.plan is not None and gathered > 0
    assert step_speed(found, machine, "bf16").seconds >= found.plan.seconds + gathered
