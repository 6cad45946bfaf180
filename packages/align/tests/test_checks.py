"""Faults that alignment on several ranks is known for: samples alike, weights sent, ranks with an empty group; and all specs."""

from __future__ import annotations

from typing import Any

import pytest
from align_models import SPECS, SPECS_OF_4, llama
from test_rollouts import COMMON, PROMPTS, TRAINERS, Numbers, grpo, small

from meshfold.align import GRPO, Prompt, fit
from meshfold.inference import Sampling
from meshfold.mesh import record
from meshfold.mesh.testing import ranks

SAME = [Prompt(ids=(3, 1), given="3 1", columns=dict(wanted=n)) for n in range(4)]


@ranks(2)
def test_samples_differ_between_data_ranks_and_steps() -> None:
    """The same prompt on both ranks in every step gets eight completions that differ, and others in the next step."""
    settings = {**COMMON, "batch_size": 4, "group": 2}
    trainer = GRPO(llama, SAME, [small], Numbers(), parallel=SPECS["data"], **settings)
    seen: list[list[tuple[int, ...]]] = []
    generate = trainer.rollout.generate

    def watched(*given: Any) -> Any:
        found = generate(*given)
        seen.append([tuple(tokens) for tokens in found.tokens])
        return found

    trainer.rollout.generate = watched  # type: ignore[method-assign]
    for number in range(3):
        trainer.step(number)
    assert all(len(set(samples)) == len(samples) == 8 for samples in seen)
    assert len({sample for samples in seen for sample in samples}) > 20
    trainer.close()


@ranks(2)
def test_no_weights_are_sent_for_a_rollout() -> None:
    """After a step of training a rollout sends what it sends again without one: activations, or tokens of data ranks."""
    sampling = Sampling(max_new_tokens=3, temperature=0.0)
    for name in ("data", "tensor"):
        trainer = grpo(parallel=SPECS[name])
        parameters = [p for p in trainer.engines["policy"].model.parameters() if p.dim() > 1]
        matrix = min(p.numel() * p.element_size() for p in parameters)
        trainer.step(0)
        sent = []
        for _ in range(2):
            with record() as log:
                trainer.rollout.generate([(3, 1), (5,)], 1, sampling)
            sent.append([(entry.kind, entry.axes, entry.block_bytes) for entry in log.entries])
        assert sent[0] and sent[0] == sent[1]
        largest = max(nbytes for _, _, nbytes in sent[0])
        assert largest < matrix or name == "tensor"  # of tensor ranks: all rows of a prefill
        trainer.close()


def none_for_some(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """Reward of two prompts; the others' groups are empty."""
    rewards = small(completions)
    return [None if prompt in ("8", "4 4 4") else one for prompt, one in zip(prompts, rewards, strict=True)]


def three_steps_with_empty_groups(**options: Any) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Metrics of three steps, and the weights after them."""
    settings = {**COMMON, "batch_size": 4, "group": 2, **options}
    trainer = GRPO(llama, PROMPTS, [none_for_some], Numbers(), **settings)
    found = fit(trainer, 3)
    weights = {name: value.flatten().tolist() for name, value in trainer.engines["policy"].full_state_dict().items()}
    trainer.close()
    return found, weights


@pytest.fixture(scope="module")
def of_empty_groups() -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    return three_steps_with_empty_groups()


@ranks(2)
def test_a_rank_with_an_empty_group(of_empty_groups: tuple[list[dict[str, float]], dict[str, list[float]]]) -> None:
    """Neither hangs nor changes a mean, whichever rank has it: metrics and weights are those of one process."""
    for name in ("data", "zero 3"):
        metrics, weights = three_steps_with_empty_groups(parallel=SPECS[name])
        for found, expected in zip(metrics, of_empty_groups[0], strict=True):
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-8)
        for key, values in weights.items():
            assert values == pytest.approx(of_empty_groups[1][key], rel=1e-9, abs=1e-9), key


@pytest.fixture(scope="module")
def three_steps() -> dict[str, list[dict[str, float]]]:
    """The metrics of each trainer's steps in one process."""
    found = {}
    for name, make in TRAINERS.items():
        trainer = make()
        found[name] = fit(trainer, 3)
        trainer.close()
    return found


def check(specs: dict[str, dict[str, Any]], expected: dict[str, list[dict[str, float]]]) -> None:
    for spec, parallel in specs.items():
        for name in ("grpo", "ppo"):
            trainer = TRAINERS[name](parallel=parallel)
            for found, one in zip(fit(trainer, 3), expected[name], strict=True):
                assert found == pytest.approx(one, rel=1e-6, abs=1e-8), (name, spec)
            trainer.close()


@pytest.mark.slow
@ranks(2)
def test_steps_equal_one_process_on_2(three_steps: dict[str, list[dict[str, float]]]) -> None:
    check(SPECS, three_steps)


@pytest.mark.slow
@ranks(4)
def test_steps_equal_one_process_on_4(three_steps: dict[str, list[dict[str, float]]]) -> None:
    check(SPECS_OF_4, three_steps)
