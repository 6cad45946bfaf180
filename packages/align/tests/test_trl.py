"""Losses and gradients of TRL 1.16 in float32, with prompts that completions share and without: three steps of SGD and their way.

``trl_numbers.py`` wrote the numbers with TRL's trainers.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_rollouts import Numbers
from test_trainers import completion
from trl_numbers import DPO_KINDS, END, GOOD, GROUPS, GRPO_KINDS, LR, MOST, OTHERS, PAIRS, moved, tiny_llama

from meshfold.align import DPO, GRPO, KTO, SFT, Preference, Prompt, RewardModel, fit
from meshfold.inference import Rollouts, Sampling
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks

NUMBERS: dict[str, Any] = json.loads(Path(__file__).with_name("trl_numbers.json").read_text(encoding="utf-8"))
COMMON: dict[str, Any] = dict(precision="fp32", optimizer=dict(name="sgd", lr=LR), kernels="off", clip_grad_norm=None)


def check(trainer: Any, what: str) -> None:
    before = {name: weight.clone() for name, weight in trainer.engines["policy"].full_state_dict().items()}
    losses = [metrics["loss"] for metrics in fit(trainer, len(NUMBERS[what]["losses"]))]
    after = trainer.engines["policy"].full_state_dict()
    trainer.close()
    assert losses == pytest.approx(NUMBERS[what]["losses"], rel=2e-6, abs=1e-6)
    for name, found in moved(before, after).items():
        # Weights around 0.2 in float32 tell a gradient to 2e-7 an element and step at this rate, which adds up over the elements.
        norm = NUMBERS[what]["moved"][name][0]
        assert found == pytest.approx(NUMBERS[what]["moved"][name], abs=1e-5 * max(1.0, norm)), name


def dpo(kind: str, shared: bool, **more: Any) -> DPO:
    pairs = [Preference(chosen=completion(p, a), rejected=completion(p, b)) for p, a, b in PAIRS]
    options = {**COMMON, **DPO_KINDS[kind], **more}
    return DPO(tiny_llama, pairs, loss=kind, batch_size=len(PAIRS), shared_prompt=shared, **options)


class Given:
    """A generator of completions that are known, by weights of the step."""

    exact = True

    def __init__(self) -> None:
        self.version = -1

    def generate(self, prompts: Any, n: int, sampling: Sampling) -> Rollouts:
        self.version += 1
        of = {tuple(prompt): completions for prompt, completions, _ in GROUPS}
        tokens = [ids for prompt in prompts for ids in of[tuple(prompt)]]
        return Rollouts(tokens, [[0.0] * len(ids) for ids in tokens], self.version)


class Ends(Numbers):
    end = END


def rewards(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    of = {
        tuple(ids): reward for _, completions, given in GROUPS for ids, reward in zip(completions, given, strict=True)
    }
    return [of[tuple(ids)] for ids in completion_ids]


def grpo(kind: str, shared: bool, **more: Any) -> GRPO:
    prompts = [Prompt(ids=tuple(prompt), given="") for prompt, *_ in GROUPS]
    options = {**COMMON, **GRPO_KINDS.get(kind, {}), **more}
    sampling = Sampling(max_new_tokens=MOST)
    return GRPO(
        tiny_llama,
        prompts,
        [rewards],
        Ends(),
        kind=kind.split(",")[0],
        group=3,
        batch_size=len(GROUPS),
        sampling=sampling,
        rollout=lambda engine: Given(),
        shared_prompt=shared,
        **options,
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo_is_that_of_trl(kind: str, shared: bool) -> None:
    check(dpo(kind, shared), f"dpo {kind}")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", GRPO_KINDS)
def test_grpo_is_that_of_trl(kind: str, shared: bool) -> None:
    check(grpo(kind, shared), f"grpo {kind}")


def other(name: str, **more: Any) -> Any:
    """The trainer of a loss without kinds, on the same examples."""
    options = {**COMMON, **OTHERS[name], **more, "batch_size": len(PAIRS)}
    if name == "sft":
        return SFT(tiny_llama, [completion(p, a) for p, a, _ in PAIRS], length=16, **options)
    if name == "kto":
        examples = [completion(p, a, good) for (p, a, _), good in zip(PAIRS, GOOD, strict=True)]
        return KTO(tiny_llama, examples, **options)
    pairs = [
        Preference(chosen=completion(p, a), rejected=completion(p, b), margin=n / 10)
        for n, (p, a, b) in enumerate(PAIRS)
    ]
    return RewardModel(partial(tiny_llama, scores=True), pairs, **options)


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_those_of_trl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfold.align.dpo.shuffled", lambda count, *given: [*range(count)])  # which pairs KTO makes
    check(other(name), name)


def test_unbiased_kl_of_rewards_is_refused() -> None:
    with pytest.raises(SpecError, match="leave unbiased_kl out"):
        grpo("rloo", True, **GRPO_KINDS["grpo, unbiased KL"])


@ranks(2)
def test_shared_prompts_on_2_are_those_of_trl() -> None:
    check(dpo("ipo", True, parallel=dict(data=2)), "dpo ipo")
    check(dpo("sigmoid", True, parallel=dict(tensor=2)), "dpo sigmoid")
    check(grpo("grpo", True, parallel=dict(pipeline=2)), "grpo grpo")
