"""Phases of memory: planned within limits, entered with the same results, and what is where counted in bytes."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch
from align_models import SPECS, llama
from hypothesis import given
from hypothesis import strategies as st
from test_rollouts import COMMON, OF_PPO, PROMPTS, SAMPLING, Numbers, grpo, small
from test_trainers import COMMON as OF_PAIRS
from test_trainers import pairs

from meshfold.align import DPO, PPO, ModelState, RewardModel, WorkSize, fit, phases_of, plan_phases, scorer
from meshfold.inference import Generator
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks
from meshfold.zero_gemini import MemoryPlanError

GIB = 2**30
ADAM: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=1e-2), precision="fp32")
ZERO: dict[str, Any] = dict(zero=dict(stage=3))


def state(name: str, elements: float, *, trained: bool = True, state: float = 10.0) -> ModelState:
    """A model in bf16 with Adam's state: 2 + 10 + 2 bytes a parameter."""
    train = 1.0 if trained else 0.0
    return ModelState(
        name=name, parameters=2 * elements, state=state * elements * train, gradients=2 * elements * train
    )


def four(elements: float, adam: float = 10.0) -> list[ModelState]:
    trained = [state(name, elements, state=adam) for name in ("policy", "critic")]
    return [*trained, *(state(name, elements, trained=False) for name in ("reference", "reward"))]


def uses_of_ppo(pages: float = 8 * GIB, activations: float = 10 * GIB) -> Any:
    return phases_of(
        trained=("policy", "critic"),
        frozen=("reference", "reward"),
        rolls_out=True,
        pages=pages,
        activations=activations,
    )


def test_ppo_of_6_billion_fits() -> None:
    """Actor and critic of 6.0 billion parameters, two frozen ones: 168 GB under 80 GiB of GPU and 125 GiB of host."""
    plan = plan_phases(four(6.0e9), uses_of_ppo(), gpu=0.97 * 80 * GIB, host=125 * GIB)
    assert [phase.use.name for phase in plan.phases] == ["rollout", "score", "train policy", "train critic"]
    for phase in plan.phases:
        assert phase.gpu_bytes <= 0.97 * 80 * GIB and phase.host_bytes <= 125 * GIB
        assert all(phase.parameters[name] == 1.0 for name in phase.use.models)  # nothing is copied block by block
    assert plan["rollout"].state["critic"] == 0.0 and plan["train critic"].state["policy"] == 0.0
    assert plan["train policy"].state["policy"] > 0.7
    table = str(plan)
    assert "train critic" in table and "100% of critic's optimizer state" in table and "of 125.0" in table
    with pytest.raises(MemoryPlanError, match=r"phase 'rollout' needs .* GiB are missing.*regime 'B' or 'C'"):
        plan_phases(four(9.0e9), uses_of_ppo(), gpu=0.97 * 80 * GIB, host=125 * GIB)
    plan_phases(four(9.0e9, adam=6.0), uses_of_ppo(), gpu=0.97 * 80 * GIB, host=125 * GIB)  # regime B


def test_pages_and_activations_are_counted() -> None:
    """The model is a tiny Llama: 2 layers, keys and values of 16 features. At most 64 completions are sampled at a time."""
    work = WorkSize.of_samples(PROMPTS, completions=100, max_new_tokens=6, updates=5, micro_steps=2)
    assert work == WorkSize(trained=100, scored=1000, sampled=640)
    trainer = grpo(beta=0.1, parallel=ZERO, memory=dict(gpu=GIB, activations=1000), **ADAM)
    plan = trainer.phases.plan
    assert plan is not None
    assert plan["rollout"].use.fixed == 12 * 10 * 2 * 2 * 16 * 4  # 3 prompts of 4 completions of 10 tokens, in float32
    assert plan["score"].use.fixed == plan["train policy"].use.fixed == 1000
    trainer.close()
    trainer = grpo(beta=0.1, parallel=ZERO, memory=dict(gpu=GIB), recompute="blocks", **ADAM)
    plan = trainer.phases.plan
    assert plan is not None and plan["train policy"].use.fixed == 12 * 10 * (2 + 34) * 16 * 4 + 2**29
    trainer.close()


def test_nothing_moves_where_everything_fits() -> None:
    plan = plan_phases(four(1e9), uses_of_ppo(), gpu=80 * GIB, host=GIB)
    assert all(phase.in_bytes == phase.out_bytes == phase.host_bytes == 0 for phase in plan.phases)
    assert str(plan).count("nothing") == 4


@given(
    st.lists(st.floats(1e6, 1e10), min_size=4, max_size=4),
    st.floats(0, 40),
    st.floats(1, 120),
    st.booleans(),
)
def test_plans_hold_their_limits(sizes: list[float], fixed: float, gpu: float, rolls_out: bool) -> None:
    names = ("policy", "critic", "reference", "reward")
    models = [state(name, n, trained=name in names[:2]) for name, n in zip(names, sizes, strict=True)]
    uses = phases_of(
        trained=names[:2], frozen=names[2:], rolls_out=rolls_out, pages=fixed * GIB, activations=fixed * GIB
    )
    if fixed > gpu:
        with pytest.raises(MemoryPlanError):
            plan_phases(models, uses, gpu=gpu * GIB)
        return
    plan = plan_phases(models, uses, gpu=gpu * GIB)
    moved = [0.0, 0.0]
    for phase in plan.phases:
        grads = sum(m.gradients for m in models if m.name == phase.use.trains)
        everything = sum(m.parameters + m.state for m in models) + grads + phase.use.fixed
        assert phase.gpu_bytes <= gpu * GIB * (1 + 1e-9)
        assert phase.gpu_bytes + phase.host_bytes == pytest.approx(everything)
        for model in models:
            assert 0.0 <= phase.state[model.name] <= phase.parameters[model.name] + 1e-12 <= 1.0 + 1e-9
        moved = [moved[0] + phase.in_bytes, moved[1] + phase.out_bytes]
    assert moved[0] == pytest.approx(moved[1], abs=1.0)  # what leaves comes back


def ppo(**options: Any) -> PPO:
    settings = {**COMMON, **OF_PPO, **ADAM, "critic_optimizer": None, **options}
    return PPO(llama, scorer(llama), PROMPTS, [small], Numbers(), **settings)


def limit_of(trainer: Any, share: float) -> int:
    """Bytes of a GPU that hold a share of all models' state, measured on one that holds everything."""
    device, host = trainer.phases.bytes_held()
    trainer.close()
    assert host == 0
    return int(share * device)


def whole(make: Any, **options: Any) -> Any:
    return make(memory=dict(gpu=10 * GIB, activations=1), **options)


def test_phases_change_no_result_and_hold_the_limit() -> None:
    """Half of the state fits: each phase holds its plan's bytes in both places, and the steps are the same."""
    # Pages of keys and values count on the GPU, too.
    pages = 4 * max(len(p.ids) + SAMPLING.max_new_tokens for p in PROMPTS) * 2 * 2 * 16 * 4
    limit = limit_of(whole(ppo, parallel=ZERO), 0.5) + pages
    plain, phased = ppo(parallel=ZERO), ppo(parallel=ZERO, memory=dict(gpu=limit / 0.97, activations=1))
    for number in range(3):
        assert phased.step(number) == plain.step(number)
    for name, engine in plain.engines.items():
        other = phased.engines[name].full_state_dict()
        for key, value in engine.full_state_dict().items():
            assert torch.equal(value, other[key])
    plan = phased.phases.plan
    assert plan is not None and list(phased.phases.held) == [phase.use.name for phase in plan.phases]
    everything = {sum(held) for held in phased.phases.held.values()}
    assert max(everything) < 1.1 * min(everything)  # nothing is there twice
    for phase in plan.phases:
        device, host = phased.phases.held[phase.use.name]
        assert device <= min(limit, phase.gpu_bytes) and host > 0, phase
    # What a phase trains is on the GPU more than in any other phase.
    for name in ("policy", "critic"):
        shares = {phase.use.name: phase.state[name] for phase in plan.phases}
        assert shares[f"train {name}"] == max(shares.values()) > min(shares.values())
    plain.close()
    phased.close()


def test_optimizer_state_leaves_in_rollouts_and_pages_stay_nowhere() -> None:
    """With room for the policy's parameters and little more, no state is on the GPU while it samples."""
    small_room = limit_of(whole(grpo, beta=0.1, parallel=ZERO, **ADAM), 0.45)
    trainer = grpo(beta=0.1, parallel=ZERO, memory=dict(gpu=small_room / 0.97 + 65536, activations=1), **ADAM)
    seen: dict[str, dict[str, int]] = {}
    enter = trainer.phases.enter

    def watched(name: str) -> None:
        enter(name)
        states: Any = trainer.engines["policy"].states
        tiers = [p.state for p in states.gemini.placements.values()]
        seen[name] = {tier: tiers.count(tier) for tier in ("device", "host")}

    trainer.phases.enter = watched  # type: ignore[method-assign]
    for number in range(2):
        trainer.step(number)
    assert trainer.phases.plan is not None
    assert trainer.phases.plan["train policy"].state["policy"] > trainer.phases.plan["rollout"].state["policy"]
    assert seen["train policy"]["device"] >= seen["rollout"]["device"]
    assert not pools()
    generator = Generator(trainer.engines["policy"].generator, tokens=64, page_size=16, most_rows=1)
    assert pools()  # while one generates
    del generator
    assert not pools()
    trainer.close()


def pools() -> list[Any]:
    """Pools of pages of keys and values that are alive."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one).__module__ == "meshfold.inference.cache"]


def test_frozen_models_have_no_optimizer_state_and_no_gradients() -> None:
    """In phases and without: not a byte beside parameters, no gradient of any tensor, before and after steps."""
    for memory in (None, dict(gpu=GIB, activations=1)):
        trainer = ppo(parallel=ZERO, memory=memory)
        trainer.step(0)
        reference: Any = trainer.reference
        gemini = reference.engine.states.gemini
        elements = sum(chunk.shard.numel() for chunk in gemini.chunks)
        held = gemini.memory.compute.used_bytes + gemini.memory.host_arena.used_bytes
        assert reference.engine.optimizer is None
        assert held <= 4 * elements + 64 * len(gemini.chunks)
        assert all(parameter.grad is None for parameter in reference.engine.model.parameters())
        assert not any(parameter.requires_grad for parameter in reference.engine.model.parameters())
        trainer.close()
    plain = DPO(llama, pairs(), **OF_PAIRS)
    plain.step(0)
    frozen: Any = plain.reference
    assert frozen.engine.optimizer is None and not frozen.engine.states.trained
    assert all(parameter.grad is None for parameter in frozen.engine.model.parameters())
    plain.close()


def test_a_reward_model_is_in_the_plan() -> None:
    """It comes in to score, and leaves for training; one that cannot move is refused."""
    of_scores: Any = dict(precision="fp32", seed=1)

    def make(**options: Any) -> tuple[PPO, RewardModel]:
        judge = RewardModel(scorer(llama), [], parallel=options["parallel"], **of_scores)
        settings = {**COMMON, **OF_PPO, **ADAM, "critic_optimizer": None, **options}
        return PPO(llama, scorer(llama), PROMPTS, [judge], Numbers(), **settings), judge

    big, first = make(parallel=ZERO, memory=dict(gpu=10 * GIB, activations=1))
    limit = limit_of(big, 0.5)
    first.close()
    plain, judge = make(parallel=ZERO)
    phased, other = make(parallel=ZERO, memory=dict(gpu=limit / 0.97 + 65536, activations=1))
    for number in range(2):
        assert phased.step(number) == plain.step(number)
    plan = phased.phases.plan
    assert plan is not None and plan["score"].parameters["reward"] > plan["train critic"].parameters["reward"]
    for one in (plain, judge, phased, other):
        one.close()
    outside = RewardModel(scorer(llama), [], **of_scores)
    settings = {**COMMON, **OF_PPO, **ADAM, "critic_optimizer": None}
    with pytest.raises(SpecError, match="the engine of 'reward'"):
        PPO(llama, scorer(llama), PROMPTS, [outside], Numbers(), parallel=ZERO, memory=dict(gpu=GIB), **settings)
    outside.close()


@ranks(2)
def test_phases_on_two_ranks() -> None:
    spec = SPECS["zero 3"]
    limit = limit_of(whole(ppo, parallel=spec), 0.6)
    plain, phased = ppo(parallel=spec), ppo(parallel=spec, memory=dict(gpu=limit / 0.97 + 32768, activations=1))
    for number in range(2):
        assert phased.step(number) == plain.step(number)
    assert all(host > 0 for _, host in phased.phases.held.values())
    plain.close()
    phased.close()


def test_phases_of_dpo() -> None:
    make: Any = lambda **more: DPO(llama, pairs(), **{**OF_PAIRS, **ADAM, "parallel": ZERO, **more})  # noqa: E731
    limit = limit_of(whole(make), 0.5)
    plain, phased = make(), make(memory=dict(gpu=limit / 0.97, activations=1))
    for number in range(2):
        assert phased.step(number) == plain.step(number)
    assert list(phased.phases.held) == ["score", "train policy"]
    assert "reference" in str(phased.phases) and "no phases" in str(plain.phases)
    plain.close()
    phased.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(memory=dict(gpu=GIB)), "zero=dict(stage=3)"),
        (dict(memory=dict(gpu=GIB), parallel=dict(zero=dict(stage=2))), "zero=dict(stage=3)"),
        (dict(memory=dict(gpu=GIB), parallel=dict(zero=dict(placement="cpu"))), "without a placement"),
        (dict(memory=dict(host=GIB), parallel=ZERO), "memory without 'gpu'"),
        (dict(memory=dict(gpu="much"), parallel=ZERO), "gpu='much'"),
        (dict(memory=dict(gpu=GIB, disk=1), parallel=ZERO), "no key 'disk'"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as told:
        ppo(**options)
    assert words in str(told.value)


def test_too_little_memory_is_refused_before_anything_is_made() -> None:
    with pytest.raises(MemoryPlanError, match="KiB are missing"):
        ppo(parallel=ZERO, memory=dict(gpu=1000, host=1000, activations=1))


def test_a_run_in_phases_is_resumed() -> None:
    """A checkpoint of models that are partly on the host goes on in phases as it would have, and loads without them."""
    memory = dict(gpu=int(limit_of(whole(ppo, parallel=ZERO), 0.5) / 0.97) + 65536, activations=1)

    def make(**options: Any) -> PPO:
        return ppo(parallel=ZERO, **options)

    with tempfile.TemporaryDirectory() as folder:
        expected = fit(make(memory=memory), 3, f"{folder}/a")
        begun = fit(make(memory=memory), 1, f"{folder}/b")
        assert [*begun, *fit(make(memory=memory), 2, f"{folder}/b", resume=True)] == expected[:2]
        assert fit(make(), 3, f"{folder}/b", resume=True) == expected[2:]
