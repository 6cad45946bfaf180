"""Every loss under every spec: two steps with unequal lengths on ranks are those of one process, metrics and every weight.

One process is held to written-out loops and TRL's numbers by the tests of losses, trainers, rollouts and TRL. With plain SGD what a
weight has moved is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from align_models import SPECS, SPECS_OF_4, llama
from test_rollouts import PROMPTS, Numbers, small
from test_trainers import completions, pairs
from torch import Tensor

from meshfold.align import DPO, GRPO, KTO, PPO, SFT, RewardModel, fit, scorer
from meshfold.inference import Sampling
from meshfold.mesh.testing import run_on_ranks

COMMON: dict[str, Any] = dict(precision="fp64", optimizer=dict(name="sgd", lr=0.2), seed=3, batch_size=4)
SAMPLED: dict[str, Any] = dict(sampling=Sampling(max_new_tokens=5, temperature=0.9), **COMMON)


def preference(kind: str, **options: Any) -> DPO:
    smoothing = 0.1 if kind in ("sigmoid", "robust") else 0.0
    return DPO(llama, pairs(), loss=kind, beta=0.5, label_smoothing=smoothing, **COMMON, **options)


def groups(kind: str, **options: Any) -> GRPO:
    return GRPO(llama, PROMPTS, [small], Numbers(), kind=kind, beta=0.1, group=3, **SAMPLED, **options)


def critic(**options: Any) -> PPO:
    settings: dict[str, Any] = dict(updates=2, critic_optimizer=dict(name="sgd", lr=0.02), **SAMPLED)
    return PPO(llama, scorer(llama), PROMPTS, [small], Numbers(), **settings, **options)


TRAINERS: dict[str, Callable[..., Any]] = {
    "sft": lambda **o: SFT(llama, completions(), length=20, **COMMON, **o),
    "reward": lambda **o: RewardModel(scorer(llama), pairs(), centering=0.1, **COMMON, **o),
    **{kind: partial(preference, kind) for kind in ("sigmoid", "hinge", "ipo", "robust", "simpo", "orpo")},
    "kto": lambda **o: KTO(llama, completions(), beta=0.5, **COMMON, **o),
    "ppo": critic,
    **{kind: partial(groups, kind) for kind in ("grpo", "dr_grpo", "dapo", "rloo")},
}
Seen = tuple[list[dict[str, float]], dict[str, Tensor]]


def seen(trainer: Any) -> Seen:
    """Metrics of two steps, and all trained weights after them."""
    found = fit(trainer, 2)
    weights = {
        f"{name} {key}": value.clone()
        for name, engine in trainer.engines.items()
        if engine.optimizer is not None
        for key, value in engine.full_state_dict().items()
    }
    trainer.close()
    return found, weights


def of_cases(cases: list[tuple[str, str]]) -> list[Seen]:
    return [seen(TRAINERS[loss](parallel=(SPECS | SPECS_OF_4)[spec])) for loss, spec in cases]


def check(size: int, cases: list[tuple[str, str]]) -> None:
    alone = {loss: seen(TRAINERS[loss]()) for loss in dict(cases)}
    for rank in run_on_ranks(size, of_cases, cases):
        for (metrics, weights), (loss, spec) in zip(rank, cases, strict=True):
            wanted, whole = alone[loss]
            for found, one in zip(metrics, wanted, strict=True):
                assert found == pytest.approx(one, rel=1e-9, abs=1e-9), (loss, spec)
            assert weights.keys() == whole.keys()
            for key, value in weights.items():
                torch.testing.assert_close(value, whole[key], rtol=1e-9, atol=1e-9, msg=f"{loss}, {spec}: {key}")


@pytest.mark.parametrize(
    ("size", "cases"), [(2, [("simpo", "zero 3"), ("robust", "pipeline"), ("rloo", "data")]), (4, [("dapo", "3d")])]
)
def test_some_losses_equal_one_process(size: int, cases: list[tuple[str, str]]) -> None:
    check(size, cases)


@pytest.mark.slow
@pytest.mark.parametrize("loss", TRAINERS)
def test_every_loss_equals_one_process(loss: str) -> None:
    check(2, [(loss, spec) for spec in SPECS])
    check(4, [(loss, spec) for spec in SPECS_OF_4])
