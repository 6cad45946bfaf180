"""A module that an engine had before: another engine takes it if it is whole, and says so if it is not."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig

IDS = torch.arange(32).view(4, 8)
SGD: dict[str, Any] = dict(name="sgd", lr=0.1)
WHOLE: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "sequence": dict(sequence=dict(mode="ring", size=2)),
}
PARTIAL: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor=2),
    "pipeline": dict(pipeline=2),
    "zero 3": dict(data=2, zero=dict(stage=3)),
}


def gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=37, hidden=16, layers=2, heads=2, max_positions=16, dropout=dropout)
    return GPT(config)


def trained(model: GPT, parallel: dict[str, Any]) -> list[float]:
    with Engine(model, parallel, optimizer=SGD) as engine:
        return [engine.train_step(engine.shard_batch(IDS)) for _ in range(2)]


@pytest.mark.parametrize("second", [{}, dict(zero=dict(stage=3))], ids=["plain", "zero 3"])
@pytest.mark.parametrize("first", [{}, dict(tensor=1)], ids=["plain", "tensor of one"])
def test_one_that_drops_trains_again_as_a_cell_that_is_run_again(first: Any, second: Any) -> None:
    model = gpt(dropout=0.5)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    losses = trained(model, first)
    model.load_state_dict(weights)
    assert trained(model, second) == pytest.approx(losses, rel=1e-6)
    assert losses[0] != losses[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("first", WHOLE)
@ranks(2)
def test_one_that_is_whole_is_taken(first: str) -> None:
    model, serial = gpt(), gpt()
    trained(model, WHOLE[first])
    trained(serial, dict(data=2))
    assert trained(model, dict(data=2)) == pytest.approx(trained(serial, dict(data=2)), rel=1e-5)


@pytest.mark.parametrize("first", PARTIAL)
@ranks(2)
def test_one_of_which_a_rank_has_a_part_is_refused(first: str) -> None:
    """By the same spec and another one, to train and to evaluate."""
    model = gpt()
    trained(model, PARTIAL[first])
    for second, optimizer in product((PARTIAL[first], dict(data=2)), (SGD, None)):
        with pytest.raises(
            SpecError, match=r"model=GPT\(\.\.\.\): an earlier engine has left only a part of it on this rank"
        ):
            Engine(model, second, optimizer=optimizer)
