"""Models of scores that start from a language model's checkpoint, under every spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from align_models import SPECS, WORDS, hugging_face, llama
from test_rollouts import PROMPTS, Numbers, small
from torch import nn

from meshfold.align import PPO, SFT, Completion, Preference, RewardModel, fit, scorer
from meshfold.checkpoint import CheckpointError
from meshfold.engine import Engine
from meshfold.inference import Sampling
from meshfold.mesh.testing import run_on_ranks

SETTINGS: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=0.1), precision="fp64", seed=3, batch_size=2)
ONE = Completion(ids=(1, 2, 3, 4), counts=(False, True, True, True))
PAIRS = [Preference(chosen=ONE, rejected=Completion(ids=(1, 2, 5), counts=(False, True, True)))] * 2


def scores_of(start: str, names: list[str]) -> list[list[float]]:
    """The scores of a completion after a step from a checkpoint, under each spec; "" is one process."""
    found = []
    for name in names:
        trainer = RewardModel(scorer(llama), PAIRS, start=start, parallel=SPECS.get(name), **SETTINGS)
        before = trainer.scores([ONE]).tolist()
        trainer.step(0)
        found.append([*before, *trainer.scores([ONE]).tolist()])
        trainer.close()
    return found


def test_every_spec_takes_all_but_the_head(tmp_path: Path) -> None:
    start = str(tmp_path / "sft")
    sft = SFT(llama, [ONE, ONE], length=8, **{**SETTINGS, "seed": 9})
    sft.step(0)
    sft.engines["policy"].save(start)
    sft.close()
    [alone] = scores_of(start, [""])
    [fresh] = scores_of(start, [""])
    assert alone == fresh and alone[0] != alone[1]
    names = ["data", "zero 3", "tensor", "pipeline"]
    for rank in run_on_ranks(2, scores_of, start, names):
        for found, name in zip(rank, names, strict=True):
            assert found == pytest.approx(alone, rel=1e-9, abs=1e-12), name


def test_a_model_of_transformers_keeps_its_own_head(tmp_path: Path) -> None:
    import transformers

    policy: Any = hugging_face()
    with Engine(policy, dict(), optimizer=dict(name="sgd", lr=0.1)) as engine:
        engine.save(tmp_path / "sft")
    config = type(policy.config)(**{**policy.config.to_dict(), "id2label": {0: "score"}})
    judge: Any = transformers.AutoModelForTokenClassification.from_config(config)
    head = {name: value.clone() for name, value in judge.state_dict().items() if name.startswith("score")}
    trainer = RewardModel(judge, PAIRS, start=str(tmp_path / "sft"), **{**SETTINGS, "precision": "fp32"})
    found = trainer.engines["policy"].full_state_dict()
    assert len(head) == 2 and all(torch.equal(found[name], value) for name, value in head.items())
    body = [name for name in found if name not in head]
    assert body and all(torch.equal(found[name], policy.state_dict()[name]) for name in body)


def test_the_folder_of_a_run_is_a_start_too(tmp_path: Path) -> None:
    sft = SFT(llama, [ONE, ONE], length=8, **SETTINGS)
    fit(sft, 1, str(tmp_path))
    again = SFT(llama, [ONE, ONE], length=8, start=str(tmp_path), **{**SETTINGS, "seed": 1})
    trained, found = (each.engines["policy"].full_state_dict() for each in (sft, again))
    assert trained.keys() == found.keys() and all(torch.equal(found[name], value) for name, value in trained.items())


def test_a_critic_starts_from_that_of_a_run(tmp_path: Path) -> None:
    """With its head, not from the policy that is beside it."""

    def ppo(**starts: str) -> PPO:
        settings = dict(sampling=Sampling(max_new_tokens=2), epochs=1, **SETTINGS)
        return PPO(llama, scorer(llama), PROMPTS, [small], Numbers(), **settings, **starts)

    first = ppo()
    fit(first, 1, str(tmp_path / "ppo"))
    found = {name: engine.full_state_dict() for name, engine in first.engines.items()}
    first.close()
    again = ppo(start=str(tmp_path / "ppo"), critic_start=str(tmp_path / "ppo"))
    for name, engine in again.engines.items():
        trained = engine.full_state_dict()
        assert trained.keys() == found[name].keys(), name
        assert all(torch.equal(found[name][each], value) for each, value in trained.items()), name
    again.close()


def test_another_model_is_refused_as_ever(tmp_path: Path) -> None:
    """Only a head of one output may differ; and what is only to score must have one already."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.middle, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Linear(4, WORDS)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.middle(self.embed(input_ids)))  # type: ignore[no-any-return]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = scorer(llama)(), nn.Parameter(torch.ones(()))

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.body(input_ids)

    more = scorer(llama)()
    more.extra = nn.Linear(4, 4)
    for name, model in (("llama", llama()), ("other", Other()), ("more", more)):
        with Engine(model, dict(), optimizer=dict(name="sgd", lr=0.1)) as engine:
            engine.save(tmp_path / name)
    for name in ("other", "more"):
        with pytest.raises(CheckpointError, match="belongs to another model"):
            RewardModel(scorer(llama), PAIRS, start=str(tmp_path / name), **SETTINGS)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        RewardModel(Scaled(), PAIRS, start=str(tmp_path / "llama"), **SETTINGS)
    with pytest.raises(CheckpointError, match="shape"):
        RewardModel(scorer(llama), [], start=str(tmp_path / "llama"), **SETTINGS)
    with pytest.raises(CheckpointError, match="does not exist"):
        RewardModel(scorer(llama), PAIRS, start=str(tmp_path / "nowhere"), **SETTINGS)
