"""Ranks that only generate: steps equal those of one process, whatever the two specs; weights go by the stated bytes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from align_models import SPECS, gpt, hugging_face
from test_rollouts import COMMON, OF_PPO, PROMPTS, Numbers, failing, of_column, small

from meshfold.align import GRPO, PPO, RewardModel, fit, part_messages, rollout_ranks, scorer
from meshfold.align.rollout import EngineRollouts
from meshfold.engine.world import join_world
from meshfold.huggingface import pretrained
from meshfold.inference import Rollouts
from meshfold.mesh import CollectiveError, LaunchError, SpecError, barrier, record
from meshfold.mesh.processes import only_ranks, running_world
from meshfold.mesh.testing import ranks
from meshfold.mesh.watchdog import watch

Weights = dict[str, list[float]]


def grpo(**options: Any) -> GRPO:
    """GRPO of a model whose head is its embedding."""
    return GRPO(gpt, PROMPTS, [small, of_column], Numbers(), **{"group": 4, **COMMON, **options})


def ppo(**options: Any) -> PPO:
    return PPO(gpt, scorer(gpt), PROMPTS, [small], Numbers(), **{**COMMON, **OF_PPO, **options})


TRAINERS: dict[str, Any] = dict(grpo=lambda **o: grpo(beta=0.1, **o), ppo=ppo)


def three_steps(name: str, **options: Any) -> tuple[list[dict[str, float]], dict[str, Weights]]:
    """Metrics of three steps, and the weights after them: of each engine, none on ranks without."""
    trainer = TRAINERS[name](**options)
    metrics = fit(trainer, 3)
    weights = {
        key: {tensor: value.flatten().tolist() for tensor, value in engine.full_state_dict().items()}
        for key, engine in trainer.engines.items()
    }
    trainer.close()
    return metrics, weights


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Any]:
    return {name: three_steps(name) for name in TRAINERS}


def check(expected: dict[str, Any], name: str, train: dict[str, Any], count: int, generate: dict[str, Any]) -> None:
    """Check that three steps equal those of one process to 1e-9, metrics on every rank and weights on those that train."""
    metrics, weights = three_steps(name, parallel=train, rollout=dict(ranks=count, parallel=generate))
    for found, one in zip(metrics, expected[name][0], strict=True):
        assert found == pytest.approx(one, rel=1e-9, abs=1e-9), (name, train, generate)
    world = running_world()
    assert world is not None and bool(weights) == (world.rank < world.size - count)
    for key, tensors in weights.items():
        for tensor, values in tensors.items():
            assert values == pytest.approx(expected[name][1][key][tensor], rel=1e-9, abs=1e-9), (name, key, tensor)


@ranks(3)
def test_steps_equal_one_process_on_3(of_one_process: dict[str, Any]) -> None:
    check(of_one_process, "grpo", SPECS["zero 3"], 1, {})
    check(of_one_process, "ppo", {}, 2, SPECS["tensor"])


@ranks(4)
def test_steps_equal_one_process_on_4(of_one_process: dict[str, Any]) -> None:
    check(of_one_process, "grpo", SPECS["tensor"], 2, SPECS["zero 3"])


@pytest.mark.slow
@ranks(4)
def test_steps_equal_one_process_in_more_specs(of_one_process: dict[str, Any]) -> None:
    for train, generate in (("pipeline", "tensor"), ("zero 3", "pipeline"), ("sequence", "data"), ("data", "sequence")):
        for name in TRAINERS:
            check(of_one_process, name, SPECS[train], 2, SPECS[generate])
    check(of_one_process, "grpo", {}, 3, dict(data=3))
    check(of_one_process, "ppo", dict(data=3), 1, {})


def bytes_here(trainer: Any) -> int:
    """Bytes of this rank's parameters: shards of them, if ranks share them."""
    found = 0
    for tensor in trainer.parts.engine.model_state.unique().values():
        windows = trainer.parts.engine.states.windows(tensor)
        found += sum(torch.Size(inside[1]).numel() for _, inside in windows) * tensor.element_size()
    return found


@ranks(3)
def test_weights_go_by_the_stated_bytes() -> None:
    """A rank that generates gets its part, once a step; nothing else as large is sent to it, and no rank gets the whole model."""
    whole = 8 * sum(p.numel() for p in gpt().parameters())
    for generate, most in ((SPECS["tensor"], 0.6), (SPECS["zero 3"], 0.6)):
        trainer = grpo(rollout=dict(ranks=2, parallel=generate))
        own = bytes_here(trainer)
        for number in range(2):
            with record() as log:
                trainer.step(number)
            sent = sum(entry.block_bytes for entry in log.entries if entry.kind == "exchange_rows")
            if trainer.engines:
                assert sent == trainer.parts.weight_bytes >= whole
            else:
                assert sent == 0 and trainer.parts.weight_bytes == own < most * whole
        assert trainer.parts.transfers == 2
        trainer.close()


@ranks(2)
def test_ranks_that_generate_keep_no_master_weights(tmp_path: Path) -> None:
    """In bf16 they have the parameters alone, of models that functions build and of folders."""
    everyone = join_world({}, "cpu")
    if everyone.mesh.rank == 0:
        hugging_face().save_pretrained(tmp_path)
    barrier(everyone.everyone)
    for model in (gpt, pretrained(tmp_path)):
        options = {**COMMON, "precision": "bf16", "rollout": dict(ranks=1)}
        trainer = GRPO(model, PROMPTS, [small], Numbers(), group=2, **options)
        trainer.step(0)
        masters, parameters = trainer.parts.engine.states.masters, trainer.parts.engine.model.parameters()
        wanted = torch.bfloat16 if trainer.parts.generates else torch.float32
        assert {masters.of(parameter).dtype for parameter in parameters} == {wanted}
        trainer.close()


@ranks(3)
def test_a_plan_of_memory_is_of_the_ranks_that_train(of_one_process: dict[str, Any]) -> None:
    """It has no phase of rollouts, and steps are the same."""
    trainer = TRAINERS["grpo"](parallel=SPECS["zero 3"], rollout=dict(ranks=1), memory=dict(gpu="1GiB"))
    for found, one in zip(fit(trainer, 2), of_one_process["grpo"][0], strict=False):
        assert found == pytest.approx(one, rel=1e-9, abs=1e-9)
    if trainer.engines:
        assert [phase.use.name for phase in trainer.phases.plan.phases] == ["score", "train policy"]
    trainer.close()


@ranks(2)
def test_weights_every_second_step() -> None:
    trainer = grpo(rollout=dict(ranks=1, every=2), max_staleness=1, importance=dict(high=1.5))
    found = fit(trainer, 3)
    assert [step["stale"] for step in found] == [0, 1, 0]
    assert found[0]["importance"] == pytest.approx(1.0, abs=1e-9) and abs(found[1]["importance"] - 1.0) > 1e-6
    assert trainer.parts.transfers == 2
    trainer.close()


@ranks(2)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(rollout=dict(ranks=1))
    whole = fit(ppo(**options), 3)
    assert [*fit(ppo(**options), 1, str(tmp_path)), *fit(ppo(**options), 3, str(tmp_path), resume=True)] == whole


def scored(judges: list[Any]) -> list[dict[str, float]]:
    trainer = GRPO(gpt, PROMPTS, judges, Numbers(), group=2, rollout=dict(ranks=1), **COMMON)
    found = fit(trainer, 1)
    trainer.close()
    return found


def judge() -> RewardModel:
    return RewardModel(scorer(gpt), [], precision="fp64", seed=1)


@pytest.fixture(scope="module")
def judged_by_one_process() -> list[dict[str, float]]:
    trainer = GRPO(gpt, PROMPTS, [judge()], Numbers(), group=2, **COMMON)
    return fit(trainer, 1)


@ranks(2)
def test_a_reward_model_is_of_the_ranks_that_train(judged_by_one_process: list[dict[str, float]]) -> None:
    with pytest.raises(SpecError, match=r"the reward model is on 2 ranks.*only_ranks\(range\(1\)\)"):
        scored([judge()])
    world = running_world()
    assert world is not None
    judges = []
    if world.rank == 0:
        with only_ranks(range(1)):
            judges = [judge()]
    for found, expected in zip(scored(judges), judged_by_one_process, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@ranks(2)
def test_mistakes_are_told_on_all_ranks() -> None:
    for rollout, more, words in (
        (dict(rank=1), {}, "rank"),
        (dict(parallel={}), {}, "say how many ranks generate"),
        (dict(ranks=0), {}, "rollout: ranks=0"),
        (dict(ranks=2), {}, "ranks=2 of a job of 2, which leaves none to train"),
        (dict(ranks=1, parallel=dict(tensor=2)), {}, "parallel of the 1 of 2 ranks that generate"),
        (dict(ranks=1), dict(parallel=dict(tensor=2)), "parallel of the 1 of 2 ranks that train"),
        (dict(ranks=1, every=3), dict(updates=2), "write max_staleness=4"),
        (dict(ranks=1), dict(reference="adapter", beta=0.1), "a model without adapters"),
    ):
        with pytest.raises(SpecError) as told:
            grpo(rollout=rollout, **more)
        assert words in str(told.value)
    for rewards, sampling, words in (
        ([failing], COMMON["sampling"], "no such judge"),
        ([small], type(COMMON["sampling"])(max_new_tokens=40), "the model has 24 positions"),
    ):
        options = {**COMMON, "sampling": sampling}
        trainer = GRPO(gpt, PROMPTS, rewards, Numbers(), group=2, rollout=dict(ranks=1), **options)
        with pytest.raises(SpecError, match=words):
            trainer.step(0)
        trainer.close()


def interrupted(completions: list[str], **columns: Any) -> list[float]:
    raise KeyboardInterrupt


def no_memory(*arguments: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@ranks(2)
def test_any_error_of_one_rank_reaches_the_other_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, with its traceback: no collective waits until the watchdog's limit, which is longer than a test may take."""
    world = running_world()
    assert world is not None
    for failing_rank, words, where in (
        (0, "rank 0, which trains, failed, so the others end: KeyboardInterrupt", "in interrupted"),
        (0, "rank 0, which trains, failed, so the others end: OutOfMemoryError: CUDA out of memory", "in no_memory"),
        (1, "rank 1, which generates, failed, so the others end: OutOfMemoryError: CUDA out of memory", "in no_memory"),
    ):
        rewards = [interrupted] if where == "in interrupted" else [small]
        trainer = GRPO(gpt, PROMPTS, rewards, Numbers(), group=2, rollout=dict(ranks=1), **COMMON)
        with monkeypatch.context() as patch:
            if where == "in no_memory" and world.rank == failing_rank:
                if failing_rank == 0:
                    patch.setattr(trainer.objective, "step", no_memory)
                else:
                    patch.setattr(rollout_ranks.EngineRollouts, "generate", no_memory)
            with pytest.raises((KeyboardInterrupt, torch.OutOfMemoryError, CollectiveError)) as told:
                trainer.step(0)
        if world.rank == failing_rank:
            assert isinstance(told.value, KeyboardInterrupt | torch.OutOfMemoryError)
        else:
            assert isinstance(told.value, CollectiveError)
            assert str(told.value).startswith(words) and where in str(told.value)
        trainer.close()


@ranks(2)
def test_a_rank_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = grpo(rollout=dict(ranks=1))
    with monkeypatch.context() as patch:
        patch.setattr(part_messages, "ended_ranks", lambda ranks: [0])
        patch.setattr(part_messages, "_LOOK_S", 0.0)
        if trainer.parts.generates:  # the other one makes no step
            with pytest.raises(LaunchError, match="rank 0, which trains, has ended, and rank 1 waits"):
                trainer.step(0)
    trainer.close()


LATE_S = {"part": 0.0}
"""How long each part takes, at least"""


def slow(completions: list[str], **columns: Any) -> list[float]:
    time.sleep(LATE_S["part"])
    return small(completions, **columns)


class SlowRollouts(EngineRollouts):
    def generate(self, *arguments: Any) -> Rollouts:
        time.sleep(LATE_S["part"])
        return super().generate(*arguments)


@ranks(2)
def test_parts_wait_longer_than_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rollouts, long training and models that take long to build are no missing ranks."""
    with monkeypatch.context() as patch:
        patch.setattr(rollout_ranks, "EngineRollouts", SlowRollouts)
        options = {**COMMON, "watchdog": 100.0}
        trainer = GRPO(gpt, PROMPTS, [slow], Numbers(), group=2, rollout=dict(ranks=1), **options)
        assert trainer.step(0)["tokens"] > 0  # its collectives take long on a busy machine, later ones do not
        short = watch(1.5)
        patch.setitem(LATE_S, "part", 2.5)
        assert trainer.step(1)["tokens"] > 0
        short.close()
        trainer.close()
