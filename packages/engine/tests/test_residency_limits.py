"""Under any limit a model trains to the same bits or says the least that it needs: whatever else happens beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.zero import device_limit
from meshfold.engine.zero.plan import plan_for
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh.collectives.push import channel_bytes
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini import MemoryPlanError
from meshfold.zero_gemini.machine_rates import ALLOCATOR_MARGIN
from meshfold.zero_gemini.planner import Limits, MiB, Plan

STEPS = 4


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=64, hidden=96, layers=4, heads=4, max_positions=16, dropout=0.0))


def engine_of(zero: dict[str, Any], model: Callable[[], nn.Module] = gpt, **settings: Any) -> Engine:
    given: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=1e-2), precision="bf16", clip_grad_norm=0.5)
    return Engine(model, dict(zero={"stage": 3, **zero}), **{**given, **settings})


def batch(step: int) -> Tensor:
    return torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))


def train(engine: Engine, steps: int = STEPS, first: int = 0) -> list[float]:
    return [engine.train_step(engine.shard_batch(batch(first + step))) for step in range(steps)]


def states_of(engine: Engine) -> ZeroStates:
    states = engine.states
    assert isinstance(states, ZeroStates)
    return states


def plan_of(engine: Engine) -> Plan:
    plan = states_of(engine).residency.plan
    assert plan is not None
    return plan


def places(engine: Engine) -> set[tuple[str, str]]:
    return {(placement.parameters, placement.state) for placement in states_of(engine).gemini.placements.values()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def any_limit(limits: list[int], stages: list[int]) -> list[bool]:
    """Which limits a model trained under. After the plan the arena lets nobody have more than it says."""
    with engine_of(dict(placement="cuda")) as engine:
        losses, weights = train(engine), engine.full_state_dict()
    trained = []
    for limit, stage in zip(limits, stages, strict=True):
        with engine_of(dict(gpu_memory_limit=limit, stage=stage)) as engine:
            found, least = attempt(engine)
            trained.append(least is None)
            if least is not None:
                assert least > limit
                continue
            plan, compute = plan_of(engine), states_of(engine).gemini.memory.compute
            assert plan.peak_gpu_bytes <= limit
            assert compute.budget_bytes is not None and compute.used_bytes <= compute.budget_bytes <= limit
            assert found == losses and same(engine.full_state_dict(), weights), limit
    return trained


def attempt(engine: Engine) -> tuple[list[float], int | None]:
    """Losses, or the least that a refusal names."""
    try:
        return train(engine), None
    except MemoryPlanError as error:
        return [], int(error.minimum_gpu_bytes)  # type: ignore[attr-defined]


def random_limits(count: int, seed: int) -> tuple[list[int], list[int]]:
    """From far too little to more than enough, and a stage for each."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.rand(count, generator=generator) * 4.5 - 0.5
    stages = torch.randint(1, 4, (count,), generator=generator).tolist()
    return [int(2.0 ** float(power) * MiB) for power in powers], stages


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "count"),
    [
        (1, 6),
        (2, 3),
        pytest.param(1, 60, marks=pytest.mark.slow),
        pytest.param(2, 30, marks=pytest.mark.slow),
    ],
)
def test_random_limits_are_kept_or_refused(world: int, count: int) -> None:
    limits, stages = random_limits(count, seed=world)
    found = run_on_ranks(world, any_limit, limits, stages, timeout_s=280.0)[0]
    assert any(found)
    if count > 3:
        assert not all(found)


@ranks(2)
def test_channels_of_other_engines_take_nothing_of_a_limit_on_a_cpu() -> None:
    """They are in memory that processes share, and stay open when an engine is closed. Each takes more than this limit."""
    limit = 5 * MiB
    with engine_of(dict(transport="push")) as engine:
        train(engine, 1)
    assert channel_bytes() > limit
    with engine_of(dict(gpu_memory_limit=limit, stage=1)) as engine:
        train(engine, 3)
        assert plan_of(engine).limits.gpu_bytes == int(limit * (1.0 - ALLOCATOR_MARGIN))


@ranks(1)
def test_on_a_gpu_a_limit_also_has_cuda_and_channels() -> None:
    with engine_of(dict(gpu_memory_limit=32 * MiB)) as engine:
        train(engine, 3)
        plan, plans = plan_of(engine), states_of(engine).residency._plans
        gpu = replace(engine.world, device=torch.device("cuda"))
        with (
            mock.patch.object(plans, "_world", gpu),
            mock.patch.object(device_limit, "channel_bytes", return_value=MiB),
            mock.patch("torch.cuda.mem_get_info", return_value=(0, 0)),
            mock.patch("torch.cuda.memory_reserved", return_value=0),
        ):
            with pytest.raises(
                MemoryPlanError, match=r"3% stay free .*, and 601\.00 MiB for CUDA and push channels"
            ) as refused:
                plans.plan(plan.workload, plan.machine, shrunk=0.0)
            least = refused.value.minimum_gpu_bytes  # type: ignore[attr-defined]
            assert 601 * MiB < least < 606 * MiB
            with mock.patch.object(plans, "_spec", replace(plans._spec, gpu_memory_limit=least)):
                assert plans.plan(plan.workload, plan.machine, shrunk=0.0).peak_gpu_bytes <= least - 601 * MiB
            with (
                mock.patch.object(plans, "_spec", replace(plans._spec, gpu_memory_limit=least - 1)),
                pytest.raises(MemoryPlanError, match=f"at least {least:,} bytes"),
            ):
                plans.plan(plan.workload, plan.machine, shrunk=0.0)


@ranks(1)
def test_the_least_is_enough_and_a_byte_less_is_not() -> None:
    with engine_of(dict(gpu_memory_limit=32 * MiB)) as engine:
        train(engine, 3)
        plan, spec = plan_of(engine), engine.spec.zero
    assert spec is not None
    for disk in (0, None):
        limits = Limits(gpu_bytes=1, host_bytes=None, disk_bytes=disk)
        with pytest.raises(MemoryPlanError, match="at least") as refused:
            plan_for(spec, plan.workload, plan.machine, limits)
        least = refused.value.minimum_gpu_bytes  # type: ignore[attr-defined]
        made = plan_for(spec, plan.workload, plan.machine, replace(limits, gpu_bytes=least))
        assert made.peak_gpu_bytes <= least
        with pytest.raises(MemoryPlanError) as again:
            plan_for(spec, plan.workload, plan.machine, replace(limits, gpu_bytes=least - 1))
        assert again.value.minimum_gpu_bytes == least  # type: ignore[attr-defined]


class Changing(nn.Module):
    """The first token says in which order its blocks run, and which: one of them twice, one not at all."""

    ORDERS = ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3), (1, 3, 0, 2, 1))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 96)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)) for _ in "0123")
        self.head = nn.Linear(96, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number in self.ORDERS[int(ids[0, 0]) % 4]:
            x = x + self.blocks[number](x)
        y: Tensor = self.head(x)
        return y


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@ranks(1)
def test_the_order_of_operations_may_change_and_evaluations_come_between() -> None:
    assert len({int(batch(step)[0, 0]) % 4 for step in range(8)}) > 2, "orders have to change"
    seen = []
    for zero in (
        dict(placement="cuda"),
        dict(gpu_memory_limit=3 * MiB),
        dict(placement="cpu", gpu_memory_limit=8 * MiB),
    ):
        with engine_of(zero, Changing, loss_fn=next_token) as engine:
            losses = [engine.eval_step(engine.shard_batch(batch(100)))]
            for step in range(8):
                losses += train(engine, 1, first=step)
                losses.append(engine.eval_step(engine.shard_batch(batch(100 + step))))
            if "gpu_memory_limit" in zero:
                assert plan_of(engine).peak_gpu_bytes <= zero["gpu_memory_limit"]  # type: ignore[operator]
                assert places(engine) - {("device", "device")}
            seen.append((losses, engine.full_state_dict()))
    for losses, weights in seen[1:]:
        assert losses == seen[0][0] and same(weights, seen[0][1])


@ranks(1)
def test_two_engines_with_limits_in_one_process() -> None:
    zeros: list[dict[str, Any]] = [
        dict(gpu_memory_limit=6 * MiB),
        dict(gpu_memory_limit=4 * MiB, stage=2),
        dict(placement="cuda"),
    ]
    alone = []
    for zero in zeros:
        with engine_of(zero) as engine:
            alone.append(train(engine))
    engines = [engine_of(zero) for zero in zeros]
    together: list[list[float]] = [[] for _ in zeros]
    for step in range(STEPS):
        for engine, losses in zip(engines, together, strict=True):
            losses += train(engine, 1, first=step)
    assert together == alone and alone[0] == alone[1] == alone[2]
    for engine in engines:
        engine.close()


PLACEMENTS: list[dict[str, Any]] = [
    dict(placement="cuda"),
    dict(gpu_memory_limit=5 * MiB),
    dict(placement="static", offload_optim_frac=0.6, offload_param_frac=0.3),
    dict(placement="cpu", offload_path=True),
    dict(placement="const", gpu_memory_limit=8 * MiB, stage=3),
    dict(placement="cpu", stage=2),
    dict(placement="static", offload_optim_frac=0.5, stage=1),
]


def handed_over(pairs: list[tuple[int, int]]) -> None:
    """Saved under one placement after a plan, loaded under another: the curve and the weights of a run without a break."""
    with tempfile.TemporaryDirectory() as folder:

        def spec(number: int) -> dict[str, Any]:
            zero = PLACEMENTS[number]
            return {**zero, **({"offload_path": folder} if "offload_path" in zero else {})}

        with engine_of(spec(0)) as engine:
            wanted, weights = train(engine, 2 * STEPS)[STEPS:], engine.full_state_dict()
        for first in dict.fromkeys(pair[0] for pair in pairs):
            path = f"{folder}/{first}"
            with engine_of(spec(first)) as engine:
                train(engine)
                engine.save(path)
            for second in (pair[1] for pair in pairs if pair[0] == first):
                with engine_of(spec(second)) as engine:
                    engine.load(path)
                    assert train(engine, first=STEPS) == wanted, (first, second)
                    assert same(engine.full_state_dict(), weights), (first, second)
        assert not list(Path(folder).glob("*.blocks"))


EVERY = [(first, second) for first in range(len(PLACEMENTS)) for second in range(len(PLACEMENTS))]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(0, 3), (2, 6)], id="some"),
        pytest.param(EVERY, marks=pytest.mark.slow, id="every"),
    ],
)
def test_a_checkpoint_goes_from_each_placement_to_each(pairs: list[tuple[int, int]]) -> None:
    run_on_ranks(1, handed_over, pairs, timeout_s=280.0)
