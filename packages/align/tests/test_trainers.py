"""Trainers under every spec make the steps of a plain loop of one process, whose loss is written out here."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from align_models import SPECS, SPECS_OF_4, WORDS, gpt, llama
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.align import DPO, KTO, SFT, Completion, Preference, RewardModel, fit, scorer
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks

LENGTHS = ((2, 7, 1), (4, 1, 9), (1, 3, 3), (5, 2, 1), (3, 1, 8), (2, 5, 6))
"""tokens of prompt, chosen and rejected of each pair: very unequal on ranks"""


def completion(prompt: list[int], rest: list[int], good: bool | None = None) -> Completion:
    counts = (False,) * len(prompt) + (True,) * len(rest)
    return Completion(ids=(*prompt, *rest), counts=counts, good=good)


def pairs() -> list[Preference]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for number, lengths in enumerate(LENGTHS):
        prompt, chosen, rejected = (torch.randint(1, WORDS, (n,), generator=draw).tolist() for n in lengths)
        found.append(
            Preference(chosen=completion(prompt, chosen), rejected=completion(prompt, rejected), margin=number / 10)
        )
    return found


def completions() -> list[Completion]:
    found = []
    for number, pair in enumerate(pairs()):
        one = pair.chosen if number % 2 else pair.rejected
        found.append(Completion(ids=one.ids, counts=one.counts, good=number % 3 == 0))
    return found


def logs_of(model: nn.Module, one: Completion) -> Tensor:
    """Log-probabilities of the tokens that count, from whole logits of one sequence."""
    ids = torch.tensor([one.ids])
    logs = torch.log_softmax(model(ids).logits[0], -1)
    places = [t for t in range(1, len(one.ids)) if one.counts[t]]
    return torch.stack([logs[t - 1, one.ids[t]] for t in places])


def sft_loss(model: nn.Module, before: nn.Module, examples: list[Completion]) -> Tensor:
    logs = torch.cat([logs_of(model, one) for one in examples])
    return -logs.mean()


def dpo_loss(model: nn.Module, before: nn.Module, examples: list[Preference]) -> Tensor:
    losses = []
    for pair in examples:
        chosen, rejected = logs_of(model, pair.chosen).sum(), logs_of(model, pair.rejected).sum()
        with torch.no_grad():
            old = logs_of(before, pair.chosen).sum() - logs_of(before, pair.rejected).sum()
        losses.append(-F.logsigmoid(0.5 * (chosen - rejected - old)))
    return torch.stack(losses).mean()


def orpo_loss(model: nn.Module, before: nn.Module, examples: list[Preference]) -> Tensor:
    losses = []
    for pair in examples:
        a, b = logs_of(model, pair.chosen).mean(), logs_of(model, pair.rejected).mean()
        odds = [x - torch.log(1 - torch.exp(x)) for x in (a, b)]
        losses.append(-F.logsigmoid(odds[0] - odds[1]))
    return 0.5 * torch.stack(losses).mean() + sft_loss(model, before, [pair.chosen for pair in examples])


def kto_loss(model: nn.Module, before: nn.Module, examples: list[Completion]) -> Tensor:
    def ratio(one: Completion) -> Tensor:
        with torch.no_grad():
            old = logs_of(before, one).sum()
        return logs_of(model, one).sum() - old

    others = [
        completion([*a.prompt], [*b.ids[len(b.prompt) :]])
        for a, b in zip(examples, [*examples[1:], examples[0]], strict=True)
    ]
    with torch.no_grad():
        baseline = torch.stack([ratio(one) for one in others]).mean().clamp(min=0)
    losses = [1 - torch.sigmoid((0.5 if one.good else -0.5) * (ratio(one) - baseline)) for one in examples]
    return torch.stack(losses).mean()


def reward_loss(model: nn.Module, before: nn.Module, examples: list[Preference]) -> Tensor:
    losses = []
    for pair in examples:
        a, b = (model(torch.tensor([one.ids])).logits[0, -1, 0] for one in (pair.chosen, pair.rejected))
        losses.append(-F.logsigmoid(a - b - pair.margin) + 0.1 * (a + b) ** 2)
    return torch.stack(losses).mean()


def plain(model: nn.Module, loss: Callable[..., Tensor], order: list[list[int]], examples: list[Any]) -> list[float]:
    """Losses of plain SGD steps with momentum."""
    before = copy.deepcopy(model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for numbers in order:
        optimizer.zero_grad()
        value = loss(model, before, [examples[n] for n in numbers])
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


COMMON: dict[str, Any] = dict(batch_size=4, precision="fp64", optimizer=dict(name="sgd", lr=0.05, momentum=0.9), seed=3)


def compare(trainer: Any, model: nn.Module, loss: Callable[..., Tensor], examples: list[Any], steps: int = 5) -> None:
    from meshfold.align.rows import shuffled

    model = model.double()
    model.load_state_dict(trainer.engines["policy"].full_state_dict())
    order = [shuffled(len(examples), step, 4, 3) for step in range(steps)]
    expected = plain(model, loss, order, examples)
    found = [metrics["loss"] for metrics in fit(trainer, steps)]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    after = model.state_dict()
    for name, value in trainer.engines["policy"].full_state_dict().items():
        torch.testing.assert_close(value, after[name], rtol=1e-8, atol=1e-9)
    trainer.close()


def test_losses_on_one_rank() -> None:
    compare(SFT(gpt, completions(), length=20, micro_steps=2, **COMMON), gpt(), sft_loss, completions())
    compare(DPO(llama, pairs(), beta=0.5, micro_steps=3, **COMMON), llama(), dpo_loss, pairs())
    compare(DPO(llama, pairs(), loss="orpo", beta=0.5, **COMMON), llama(), orpo_loss, pairs(), 2)
    compare(KTO(llama, completions(), beta=0.5, **COMMON), llama(), kto_loss, completions(), 3)
    scores = scorer(llama)
    compare(RewardModel(scores, pairs(), centering=0.1, **COMMON), scores(), reward_loss, pairs(), 3)


@ranks(2)
def test_dpo_equals_one_process() -> None:
    for name in ("zero 3", "tensor", "pipeline"):
        compare(DPO(llama, pairs(), beta=0.5, parallel=SPECS[name], **COMMON), llama(), dpo_loss, pairs())


@pytest.mark.slow
@ranks(2)
def test_dpo_equals_one_process_in_more_specs() -> None:
    for name in ("data", "sequence"):
        compare(DPO(llama, pairs(), beta=0.5, parallel=SPECS[name], **COMMON), llama(), dpo_loss, pairs())


@ranks(2)
def test_other_trainers_equal_one_process() -> None:
    zero, pipeline = SPECS["zero 3"], SPECS["pipeline"]
    compare(SFT(gpt, completions(), length=12, parallel=zero, **COMMON), gpt(), sft_loss, completions(), 2)
    compare(SFT(llama, completions(), length=12, parallel=pipeline, **COMMON), llama(), sft_loss, completions(), 2)
    compare(KTO(llama, completions(), beta=0.5, parallel=zero, **COMMON), llama(), kto_loss, completions(), 2)


# A reward model has the two specs that the trainers above have not.
@pytest.mark.parametrize(
    "names",
    [("tensor", "sequence"), pytest.param(("zero 3", "pipeline", "data"), marks=pytest.mark.slow)],
    ids=["some", "rest"],
)
@ranks(2)
def test_a_reward_model_equals_one_process(names: tuple[str, ...]) -> None:
    scores = scorer(llama)
    for name in names:
        trainer = RewardModel(scores, pairs(), centering=0.1, parallel=SPECS[name], **COMMON)
        compare(trainer, scores(), reward_loss, pairs(), 2)


@pytest.mark.slow
@ranks(4)
def test_dpo_equals_one_process_on_4() -> None:
    for spec in SPECS_OF_4.values():
        compare(DPO(llama, pairs(), beta=0.5, parallel=spec, **COMMON), llama(), dpo_loss, pairs())


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    def trainer() -> DPO:
        return DPO(llama, pairs(), beta=0.5, **{**COMMON, "optimizer": dict(name="adamw", lr=1e-2)})

    with tempfile.TemporaryDirectory() as folder:
        whole = fit(trainer(), 5, f"{folder}/a", save_every=2)
        broken = fit(trainer(), 3, f"{folder}/b")
        rest = fit(trainer(), 5, f"{folder}/b", resume=True)
        assert [*broken, *rest] == whole and len(rest) == 2
        with pytest.raises(SpecError, match="has a run of 5 steps"):
            fit(trainer(), 5, f"{folder}/b")
        metrics = [Path(folder, name, "metrics.jsonl").read_text() for name in "ab"]
        assert metrics[0] == metrics[1] and metrics[0].count("\n") == 5


def test_a_reference_has_no_optimizer_state_and_no_gradients() -> None:
    trainer = DPO(llama, pairs(), **COMMON)
    fit(trainer, 1)
    reference: Any = trainer.reference
    assert reference.engine.optimizer is None
    assert all(p.grad is None and not p.requires_grad for p in reference.engine.model.parameters())
    now, before = trainer.engines["policy"].full_state_dict(), reference.engine.full_state_dict()
    assert any(not torch.equal(now[name], before[name]) for name in before)
    trainer.close()


def test_adapters_are_held_to_their_base() -> None:
    from align_models import hugging_face
    from peft import LoraConfig, get_peft_model

    def adapted() -> nn.Module:
        made: nn.Module = get_peft_model(hugging_face(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        return made

    trainer = DPO(adapted(), pairs(), beta=0.5, reference="adapter", **{**COMMON, "precision": "fp32"})
    found = [metrics["loss"] for metrics in fit(trainer, 4)]
    assert found[0] == pytest.approx(0.693147, abs=1e-5) and found[-1] < found[0] - 1e-3
    trained = [name for name, p in trainer.engines["policy"].model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    trainer.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DPO(llama, pairs(), loss="sigmod"), "Did you mean 'sigmoid'"),
        (lambda: DPO(llama, pairs(), beta=-1.0), "beta=-1.0"),
        (lambda: DPO(llama, pairs(), reference="base", optimizer=dict(name="sgd", lr=0.1)), "reference='base'"),
        (lambda: DPO(llama, pairs(), reference="adapter", optimizer=dict(name="sgd", lr=0.1)), "without adapters"),
        (lambda: KTO(llama, completions(), batch_size=1), "batch_size=1"),
        (lambda: KTO(llama, [pairs()[0].chosen] * 2), "'label': true or false"),
        (lambda: RewardModel(llama, pairs(), centering=-1.0), "centering=-1.0"),
        (lambda: DPO(llama, [dict(prompt="a")]), "pairs: a dict is no Preference: write pairs=tokenized("),  # type: ignore[list-item]
        (lambda: KTO(llama, pairs()), "completions: a Preference is no Completion"),  # type: ignore[arg-type]
        (lambda: SFT(llama, "a.jsonl"), "completions: a str is no list of Completion"),  # type: ignore[arg-type]
        (lambda: RewardModel(llama, completions()), "tokenized(read_records(file), tokenizer, preference_of)"),  # type: ignore[arg-type]
        (lambda: fit(SFT(gpt, completions(), micro_steps=9, **COMMON), 1), "in micro_steps=9"),
        (lambda: fit(RewardModel(llama, pairs(), **COMMON), 1), "a number a token"),
    ],
)
def test_mistakes(make: Callable[[], object], words: str) -> None:
    with pytest.raises(SpecError) as told:
        make()
    assert words in str(told.value)


def test_dropout_is_refused() -> None:
    from meshfold.models import Llama, LlamaConfig

    def dropping() -> nn.Module:
        return Llama(LlamaConfig(vocab_size=WORDS, hidden=16, layers=1, heads=2, kv_heads=2, dropout=0.1))

    with pytest.raises(SpecError, match=r"drops 0\.1"):
        DPO(dropping, pairs(), optimizer=dict(name="sgd", lr=0.1))


def larger(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A back end of torch.compile whose graphs round, very coarsely, as no uncompiled block does."""

    def run(*given: Any) -> Any:
        return tuple(x * 1.25 if isinstance(x, Tensor) and x.is_floating_point() else x for x in graph(*given))

    return run


def test_a_compiled_policy_has_the_log_probabilities_of_its_reference() -> None:
    plain, compiled = (
        DPO(llama(), pairs(), batch_size=6, beta=0.5, parallel=dict(data=1), optimizer=dict(name="sgd", lr=0.1), **more)
        for more in ({}, dict(compile=dict(backend=larger)))
    )
    assert plain.step(0)["loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert compiled.step(0)["loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert compiled.step(1)["loss"] != pytest.approx(plain.step(1)["loss"], rel=1e-4)  # blocks were compiled
