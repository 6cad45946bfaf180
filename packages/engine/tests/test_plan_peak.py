"""Memory under a limit: what is recorded, operator by operator or in each timestep, is what was planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from meshfold.engine import Engine
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh.model_io import LiveBytes
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini.memory.arena import Arena
from meshfold.zero_gemini.planner import Plan, policies, timeline
from meshfold.zero_gemini.planner.copies_ahead import Planner
from meshfold.zero_gemini.prefetch import ready_in_time
from meshfold.zero_gemini.profiler import StepTracer, WallClock
from meshfold.zero_gemini.sharded_model import chunked_model
from meshfold.zero_gemini.sharded_model.build import lay_out_parameters

WORDS, LIMIT = 4096, 10 * 2**20


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="this test trains a model of transformers")
    return transformers.LlamaForCausalLM(  # type: ignore[no-any-return]
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


class Recorded(LiveBytes):
    """The most that chunks and what operators make take together."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(round_bytes=512)  # as the allocator of a GPU
        self._arena, self.most = arena, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.bytes + self._arena.used_bytes)
        return made


def test_steps_take_what_was_planned_and_none_before_the_plan_goes_beyond_the_limit() -> None:
    """Whole logits: the largest blocks that there are. With 60 % of the limit for state, the first steps ran out of it."""
    zero = dict(stage=3, placement="auto", gpu_memory_limit=LIMIT)
    ids = torch.randint(0, WORDS, (2, 64), generator=torch.Generator().manual_seed(0))
    with Engine(
        llama, dict(zero=zero), optimizer=dict(name="adamw", lr=1e-3), precision="bf16", kernels="off"
    ) as engine:
        states = engine.states
        assert isinstance(states, ZeroStates)
        planned = 0
        for _ in range(5):
            plan = states.residency.plan
            with Recorded(states.gemini.memory.compute) as recorded:
                engine.backward(engine(input_ids=ids, labels=ids).loss)
            assert recorded.most <= LIMIT
            if plan is not None:
                planned += 1
                assert recorded.most == pytest.approx(plan.peak_gpu_bytes, rel=1e-3)
            engine.step()
        assert planned >= 3


class Peaks:
    """The most that chunks take in a timestep, for a tracer."""

    round_bytes = 512

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __enter__(self) -> Peaks:
        self.take()
        return self

    def __exit__(self, *error: object) -> None: ...

    def take(self) -> tuple[int, int]:
        most = self._arena.peak_bytes
        self._arena.reset_peak()
        return most, self._arena.used_bytes


class Turned(nn.Module):
    """Its parts are registered in the opposite order, so the first gradients that are complete are reduced last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(96, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 768), nn.Linear(768, 96)) for _ in range(5))
        self.embed = nn.Embedding(64, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in reversed(self.blocks[1:]):  # no backward reaches the first
            x = x + block(x)
        y: torch.Tensor = self.head(x)
        return y


def gpt() -> nn.Module:
    """Several blocks share its first chunk, whose reduction begins long after that of the second."""
    return GPT(GPTConfig(vocab_size=64, hidden=96, layers=4, heads=4, max_positions=16, dropout=0.0))


def chunks_in_every_timestep(made: str, clip: float | None, accumulate: int) -> None:
    model: Any = {"gpt": gpt, "turned": Turned}[made]
    settings: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=1e-3), precision="bf16", clip_grad_norm=clip)
    settings["gradient_accumulation"] = accumulate
    if made == "turned":
        settings["loss_fn"] = lambda logits, ids: nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), ids.flatten()
        )
    with Engine(model, dict(zero=dict(stage=2, gpu_memory_limit=10 * 2**20)), **settings) as engine:
        states = engine.states
        assert isinstance(states, ZeroStates)
        ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
        for _ in range(5 * accumulate - 1):
            engine.train_step(engine.shard_batch(ids))
        plan = states.residency.plan
        assert plan is not None
        planned = [at.bytes - at.kinds["non-model"] for at in timeline(plan)]
        with StepTracer(engine.model, memory=Peaks(states.gemini.memory.compute), clock=WallClock()) as tracer:
            engine.train_step(engine.shard_batch(ids))
        found = tracer.trace()
        assert found.order == plan.workload.units
        taken = [timestep.non_model_bytes for timestep in found.timesteps]
        assert min(taken) > 0
        assert [more for more, most in zip(taken, planned, strict=True) if more > most] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("made", "clip", "accumulate"),
    [("gpt", 1.0, 1), ("gpt", None, 1), ("gpt", 1.0, 2), ("turned", 1.0, 1), ("turned", None, 1), ("turned", None, 2)],
)
def test_chunks_never_take_more_than_is_planned_for_that_timestep(
    made: str, clip: float | None, accumulate: int, world: int
) -> None:
    """Look at the last of several micro-steps: it begins while the ranks sum a gradient of the one before."""
    run_on_ranks(world, chunks_in_every_timestep, made, clip, accumulate)


def far_ahead(made: Plan, planned: Planner) -> Plan:
    """Plan with copies that begin three units ahead, whatever they save."""
    workload = made.workload
    ready = ready_in_time([1.0] * workload.timesteps, 3.0, light=workload.light_timesteps, prefetch=1)
    found = planned(replace(workload, ready=ready), made.machine, made.limits)
    assert found is not None
    return found


def deep() -> nn.Module:
    return GPT(GPTConfig(vocab_size=64, hidden=96, layers=12, heads=4, max_positions=16, dropout=0.0))


def laid_out_in_blocks(*args: Any, **settings: Any) -> Any:
    return lay_out_parameters(*args, **{**settings, "chunk_elems": 12 * 96 * 97})


def beyond(taken: list[int], plan: Plan) -> list[int]:
    """Return the timesteps in which chunks take more than is planned: a unit's gathers begin just before the tracer knows of it."""
    planned = [at.bytes - at.kinds["non-model"] for at in timeline(plan)]
    return [t for t, more in enumerate(taken) if more > max(planned[t : t + 2])]


def copies_begin_far_ahead() -> None:
    losses: list[list[float]] = []
    settings: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=1e-3), precision="bf16", clip_grad_norm=1.0)
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    small = mock.patch.object(chunked_model, "lay_out_parameters", laid_out_in_blocks)
    for limit in (None, 5_500_000):
        torch.manual_seed(0)
        zero = dict(stage=3) if limit is None else dict(stage=3, gpu_memory_limit=limit)
        with (
            small,
            mock.patch.object(policies, "with_copies_ahead", far_ahead),
            Engine(deep, dict(zero=zero), **settings) as engine,
        ):
            losses.append([engine.train_step(engine.shard_batch(ids)) for _ in range(5)])
            if limit is None:
                continue
            states = engine.states
            assert isinstance(states, ZeroStates)
            plan = states.residency.plan
            assert plan is not None and plan.workload.ready is not None
            assert "host" in {chunk.parameters for chunk in plan.chunks}
            states.gemini.flush()  # no step delays a copy
            with StepTracer(engine.model, memory=Peaks(states.gemini.memory.compute), clock=WallClock()) as tracer:
                engine.train_step(engine.shard_batch(ids))
            taken = [timestep.non_model_bytes for timestep in tracer.trace().timesteps]
            by_count = replace(plan, workload=replace(plan.workload, ready=None))
            assert beyond(taken, plan) == [] != beyond(taken, by_count)
    assert losses[0] == losses[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
def test_chunks_that_come_far_ahead_take_what_is_planned_and_losses_stay(world: int) -> None:
    run_on_ranks(world, copies_begin_far_ahead)
