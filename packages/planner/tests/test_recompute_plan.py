"""``recompute="auto"``: the plan says which blocks keep their activations, and what is alive then is what it said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.cli import main
from meshfold.engine import Engine
from meshfold.engine.zero.memory import Pressure
from meshfold.engine.zero.residency import Residency
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh import ParallelSpec
from meshfold.mesh.model_io import ATTENTION_OF
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig
from meshfold.planner import Estimate, estimate, find_machine
from meshfold.planner.fitting import suggest_change
from meshfold.zero_gemini import MemoryPlanError
from meshfold.zero_gemini.planner import MiB, Plan
from meshfold.zero_gemini.planner.memory import layer_bytes
from meshfold.zero_gemini.profiler import LiveBytes, StepTracer, Trace, WallClock

STEPS, LAYERS = 4, 4  # measured steps are three: one is under their plan
Trained = tuple[list[float], dict[str, Tensor]]


def gpt(dropout: float = 0.1, layers: int = LAYERS) -> GPT:
    return GPT(GPTConfig(vocab_size=128, hidden=64, layers=layers, heads=4, max_positions=64, dropout=dropout))


def batch(step: int) -> Tensor:
    return torch.randint(128, (16, 64), generator=torch.Generator().manual_seed(step))


def engine_of(recompute: str | None, **zero: Any) -> Engine:
    return Engine(
        gpt,
        dict(zero=dict(stage=3, **zero)),
        optimizer=dict(name="adamw", lr=1e-2),
        precision="bf16",
        clip_grad_norm=0.5,
        recompute=recompute,
    )


def train(engine: Engine, steps: int = STEPS, first: int = 0) -> list[float]:
    """Losses and gradient norms."""
    seen = []
    for step in range(first, first + steps):
        seen.append(engine.train_step(engine.shard_batch(batch(step))))
        assert engine.last is not None and engine.last.grad_norm is not None
        seen.append(engine.last.grad_norm)
    return seen


def residency(engine: Engine) -> Residency:
    states = engine.states
    assert isinstance(states, ZeroStates)
    return states.residency


def plan_of(engine: Engine) -> Plan:
    plan = residency(engine).plan
    assert plan is not None
    return plan


def kept(engine: Engine) -> tuple[str, ...]:
    """Blocks that keep their activations: what the plan says is what is done."""
    assert engine.recomputed_blocks is not None
    made = {layer.name for layer in plan_of(engine).layers if layer.kept}
    blocks = engine.recomputed_blocks
    assert made == {*blocks.kept, *(ATTENTION_OF + name for name in blocks.with_attention)}
    return blocks.kept


def assert_same(engine: Engine, seen: list[float], wanted: Trained) -> None:
    assert seen == wanted[0]
    state = engine.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in wanted[1].items())


@cache
def whole() -> Trained:
    """Everything kept, everything on the device; the same for all tests of a rank."""
    with engine_of(None, placement="cuda") as engine:
        return train(engine), engine.full_state_dict()


def traced(engine: Engine) -> Trace:
    """One more step, watched."""
    ids = engine.shard_batch(batch(50))
    with StepTracer(engine.model, memory=LiveBytes(), clock=WallClock()) as tracer:
        engine.backward(engine(ids, labels=ids).loss)
    engine.step()
    return tracer.trace()


@pytest.mark.parametrize("between", [[], pytest.param([8 * MiB], marks=pytest.mark.slow)], ids=["some", "all"])
@ranks(1)
def test_what_is_kept_depends_on_the_limit_and_what_is_alive_is_what_was_planned(between: list[int]) -> None:
    wanted, counts = whole(), {}
    for limit in (None, 10 * MiB, *between, 6 * MiB):
        with engine_of("auto", **({} if limit is None else dict(gpu_memory_limit=limit))) as engine:
            assert_same(engine, train(engine), wanted)
            plan = plan_of(engine)
            counts[limit] = len(kept(engine))
            planned = [
                value + sum(layer_bytes(plan.workload)[j, int(x.kept), t] for j, x in enumerate(plan.layers))
                for t, value in enumerate(plan.workload.non_model_bytes)
            ]
            alive = [timestep.non_model_bytes for timestep in traced(engine).timesteps]
            assert len(alive) == len(planned)
            assert max(alive) == pytest.approx(max(planned), rel=0.05)
            turn = plan.workload.forward_timesteps
            assert all(a <= 1.05 * b for a, b in zip(alive[turn:-2], planned[turn:-2], strict=True))
            assert plan.peak_gpu_bytes <= (limit or 2**60)
    # Where two blocks would fit, measured seconds may still say that one of them is better computed again.
    assert counts[None] == LAYERS > counts[10 * MiB] > counts[6 * MiB], counts
    for limit in between:
        assert counts[10 * MiB] >= counts[limit] >= counts[6 * MiB], counts


@ranks(1)
def test_a_limit_that_recomputing_alone_meets() -> None:
    with engine_of("blocks", gpu_memory_limit=5 * MiB) as engine:
        found = train(engine), engine.full_state_dict()
        assert not plan_of(engine).layers
    with engine_of("auto", gpu_memory_limit=5 * MiB) as engine:
        assert_same(engine, train(engine), found)
    with (
        engine_of(None, gpu_memory_limit=5 * MiB) as engine,
        pytest.raises(MemoryPlanError, match="recompute='blocks'"),
    ):
        train(engine)
    with engine_of("auto", gpu_memory_limit=1 * MiB) as engine, pytest.raises(MemoryPlanError) as raised:
        train(engine)
    assert "recompute" not in str(raised.value)  # nothing is kept already


@pytest.mark.parametrize("parallel", [pytest.param(dict(data=2), marks=pytest.mark.slow), dict(tensor=2)], ids=str)
@ranks(2)
def test_on_two_ranks_with_tensor_parallelism_and_accumulation(parallel: dict[str, Any]) -> None:
    seen = []
    for recompute, zero in (
        (None, dict(placement="cuda")),
        ("auto", dict(gpu_memory_limit=25 * MiB // 4)),
    ):
        engine = Engine(
            gpt,
            dict(**parallel, zero=dict(stage=3, **zero)),
            optimizer=dict(name="adamw", lr=1e-2),
            precision="bf16",
            gradient_accumulation=2,
            recompute=recompute,
        )
        seen.append([engine.train_step(engine.shard_batch(batch(step))) for step in range(8)])
        if recompute:
            assert 0 < len(kept(engine)) < LAYERS, (parallel, kept(engine), plan_of(engine).peak_gpu_bytes)
        engine.close()
    assert seen[0] == seen[1]


# -- memory that was not enough ----------------------------------------------------------------------------------------


def _raise() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@ranks(1)
def test_a_plan_that_was_too_tight_lets_go_of_activations() -> None:
    wanted = whole()
    with engine_of("auto", gpu_memory_limit=10 * MiB) as engine:
        seen = train(engine, 3)
        before, limit = kept(engine), plan_of(engine).limits.gpu_bytes
        for _ in range(3):  # three times in one step
            block, handles = engine.model.get_submodule("blocks.3"), []
            handles.append(block.register_forward_pre_hook(lambda *_, h=handles: h.pop().remove() or _raise()))
        with pytest.warns(UserWarning, match=r"ran out of memory; .* more blocks recompute, from now on"):
            seen += train(engine, STEPS - 3, first=3)
        assert len(kept(engine)) < len(before)
        assert plan_of(engine).limits.gpu_bytes < limit  # type: ignore[operator]
        assert_same(engine, seen, wanted)


@ranks(1)
def test_what_no_plan_can_relieve_is_recomputed() -> None:
    with engine_of("auto", gpu_memory_limit=24 * MiB) as engine:
        train(engine, 3)
        assert kept(engine)
        states = residency(engine)
        states._shrunk = 0.9  # no plan fits any more
        assert states.can_relieve(torch.OutOfMemoryError())
        with pytest.warns(UserWarning, match=f"{LAYERS} more blocks recompute"):
            states.relieve()
        assert engine.recomputed_blocks is not None and not engine.recomputed_blocks.kept


@pytest.mark.slow
@ranks(2)
def test_of_several_ranks_one_that_is_near_the_end_makes_all_plan_again() -> None:
    seen = {}
    for short in (False, True):
        engine = Engine(
            gpt,
            dict(data=2, zero=dict(stage=3, gpu_memory_limit=14 * MiB)),
            optimizer="adamw",
            precision="bf16",
            recompute="auto",
        )
        losses, peaks = [], []
        for step in range(8):
            if short and step == 4 and engine.mesh.rank == 1:
                ours = residency(engine)._pressure
                ours._retries -= 1  # as if the allocator had tried once more on this rank alone
            losses.append(engine.train_step(engine.shard_batch(batch(step))))
            if step >= 2:
                peaks.append(plan_of(engine).limits.gpu_bytes)
        seen[short] = losses
        # said after step 4, heard after step 5
        assert (peaks[0] == peaks[2] > peaks[3] == peaks[-1]) if short else len(set(peaks)) == 1, peaks  # type: ignore[operator]
        engine.close()
    assert seen[True] == seen[False]


@ranks(2)
def test_all_ranks_hear_what_one_says() -> None:
    engine = engine_of(None, placement="cuda")
    pressure, mine = Pressure(engine.world), engine.mesh.rank == 1
    said = [pressure.found(peak_bytes=peak, most_bytes=100) for peak in (99, 101 if mine else 0, 0, 0)]
    assert said == [False, False, True, False]
    pressure.found(peak_bytes=101, most_bytes=100)
    pressure.forget()
    assert not pressure.found(peak_bytes=0, most_bytes=100)
    engine.close()


# -- without a device -------------------------------------------------------------------------------------------------


def planned(recompute: str | None, model: Any = gpt, parallel: dict[str, Any] | None = None, **zero: Any) -> Estimate:
    spec = ParallelSpec.parse({**(parallel or {}), "zero": dict(stage=3, **zero)})
    return estimate(
        model,
        spec.with_world_size(spec.world_size),
        batch_size=16,
        seq_len=64,
        precision="bf16",
        machine=find_machine("h200x8"),
        recompute=recompute,
        name="it",
    )


@pytest.mark.slow
def test_kept_as_planned_is_kept_as_never_recomputed() -> None:
    """With room for all, the plan that keeps all blocks takes what is never recomputed, to the smallest piece of memory."""
    without, blocks, auto = planned(None), planned("blocks"), planned("auto")
    assert without.plan is not None and blocks.plan is not None and auto.plan is not None
    assert sum(layer.kept for layer in auto.plan.layers) == LAYERS and not without.plan.layers
    assert without.plan.peak_gpu_bytes > blocks.plan.peak_gpu_bytes
    for found, expected in zip(auto.plan.gpu_bytes, without.plan.gpu_bytes, strict=True):
        assert abs(found - expected) <= 512  # a number that the backward of a block holds
    assert auto.plan.seconds == pytest.approx(without.plan.seconds, rel=0.01)
    assert blocks.plan.seconds > 1.1 * auto.plan.seconds
    assert auto.flops == without.flops < blocks.flops
    assert auto.memory.total == auto.plan.peak_gpu_bytes


@pytest.mark.slow
def test_collectives_of_what_is_kept_are_made_once() -> None:
    without, blocks, auto = (planned(recompute, parallel=dict(tensor=2)) for recompute in (None, "blocks", "auto"))
    assert auto.traffic == without.traffic
    assert blocks.moved > without.moved


def test_bytes_on_meta_are_those_of_a_run() -> None:
    dry = planned("auto", model=partial(gpt, 0.0)).plan
    assert dry is not None
    found = {layer.name: (layer.kept_bytes, layer.first, layer.last) for layer in dry.workload.layers}
    assert len(found) == LAYERS
    from meshfold.engine.model.recompute import RecomputedBlocks

    model = gpt(0.0).bfloat16()
    blocks = RecomputedBlocks(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with (
        StepTracer(model, memory=LiveBytes(round_bytes=512), clock=WallClock()) as tracer,
        blocks.watched(tracer.layers),
    ):
        model(batch(0), labels=batch(0)).loss.backward()
    run = {layer.name: (layer.kept_bytes, layer.first, layer.last) for layer in tracer.trace().layers}
    rows = 16 * 64
    for name, (size, first, last) in found.items():
        assert run[name][1:] == (first, last)
        # attention of a CPU keeps what flash attention does, numbers of a row in other shapes
        assert run[name][0] == pytest.approx(size, abs=8 * rows * 4)


def test_what_a_block_keeps_by_hand() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(torch.sigmoid(self.up(x)).square())
            return y

    from meshfold.engine.model.recompute import RecomputedBlocks

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(16, 16), nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return x.sum()

    model = Two().to("meta")
    blocks = RecomputedBlocks(model)
    x = torch.empty(8, 16, device="meta")
    with StepTracer(model, memory=LiveBytes(), clock=WallClock()) as tracer, blocks.watched(tracer.layers):
        model(x).backward()
    trace = tracer.trace()
    first, second = trace.layers
    assert trace.order == ("stem", "blocks.0", "blocks.1", "blocks.1", "blocks.0", "stem")
    # sigmoid's output (its own backward's, and square's input) and the square's; not x, not the weights
    assert first.kept_bytes == second.kept_bytes == 2 * 4 * 8 * 32
    assert (first.first, first.last, second.first, second.last) == (1, 3, 2, 2)
    assert all(layer.seconds > 0 for layer in trace.layers)


def test_meshfold_plan_prints_and_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "gpt-small",
        "--batch-size",
        "16",
        "--parallel",
        "zero.stage=3",
        "--recompute",
        "auto",
    ]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "layers (4 of 4 kept)" in shown and re.search(r"blocks.0 … blocks.3 \(4\) +kept", shown) and "saved" in shown
    assert main([*words, "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["zero"]["layers"]
    names = [f"blocks.{i}" for i in range(4)]
    assert layers == [{"name": name, "kept": True} for name in (*names, *(ATTENTION_OF + name for name in names))]
    assert main(["plan", "--model", "gpt-small", "--recompute", "auto"]) == 1
    assert "no entry zero" in capsys.readouterr().err


def test_a_misfit_tries_zero_with_recomputed_blocks() -> None:
    """States and activations may each be too much: only the two changes together help."""
    machine = replace(find_machine("h100"), memory=1.0)
    found = estimate(gpt, ParallelSpec.parse(dict(data=2)), batch_size=2, seq_len=16)
    seen: list[tuple[bool, str | None]] = []

    def again(spec: ParallelSpec, blocks: str | None, _: int) -> Estimate:
        seen.append((spec.zero is not None, blocks))
        return replace(found, spec=spec, refusal="" if spec.zero is not None and blocks else "too much")

    assert suggest_change(found, machine, None, 1, again) == "With zero=dict(stage=3) and --recompute blocks it fits"
    assert seen == [(False, "blocks"), (True, None), (True, "blocks")]
    assert "zero=dict(stage=3) and" not in suggest_change(found, machine, "blocks", 1, lambda *_: found)
