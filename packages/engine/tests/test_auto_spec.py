"""``parallel="auto"``: the engine takes the suggested spec and trains; what it cannot choose for is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshfold.engine import Engine
from meshfold.engine.assembly import auto_spec
from meshfold.mesh import SpecError
from meshfold.models import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=64, hidden=32, layers=3, heads=2, max_positions=16)
IDS = torch.arange(32).reshape(2, 16) % 64


def test_the_chosen_spec_trains_like_a_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=0.1), precision="fp64", device="cpu")
    losses = []
    for parallel in ("auto", {}):
        engine = Engine(lambda: GPT(CONFIG), parallel, example=IDS if parallel else None, **settings)
        losses.append([engine.train_step(IDS) for _ in range(2)])
        engine.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert "parallel='auto' chose dict(" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "example", "words"),
    [
        (nn.Linear(2, 2), IDS, "this one is already built"),
        (lambda: GPT(CONFIG), None, "depends on the batch"),
    ],
)
def test_what_it_cannot_choose_for_is_refused(model: Any, example: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Engine(model, "auto", example=example)


def test_it_chooses_before_ranks_join(monkeypatch: pytest.MonkeyPatch) -> None:
    class Joined:
        size = 2

    monkeypatch.setattr(auto_spec, "running_world", Joined)
    with pytest.raises(SpecError, match="already running"):
        Engine(lambda: GPT(CONFIG), "auto", example=IDS)


def test_another_word_is_no_spec() -> None:
    with pytest.raises(SpecError, match="not a dict"):
        Engine(lambda: GPT(CONFIG), "automatic")
