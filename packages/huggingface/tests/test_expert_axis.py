"""Mixtures of transformers in the engine, their experts over ranks: losses, norms and every gradient are those of one process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine
from meshfold.experts import balance_loss, keep_routing
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parents[2] / "experts" / "tests"))  # for the models there, on every rank
from expert_models import COMMON, FAMILIES, WHOLE_ATTENTION, model_of

# transformers computes norms, softmax and the loss in float32 whatever the weights are.
TOLERANCE = 3e-6
Seen = list[tuple[list[float], dict[str, Tensor]]]


def model(family: str) -> Any:
    made = model_of(family)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.5)
    return made


def batch() -> dict[str, Tensor]:
    ids = torch.randint(COMMON["vocab_size"], (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 3 == 0, -100)}


def steps(cases: list[tuple[str, dict[str, Any]]]) -> Seen:
    """Loss and norm of a step of SGD, and the weights behind it, of each model and spec."""
    found: Seen = []
    for family, parallel in cases:
        settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64", clip_grad_norm=0.5)
        if "tensor" in parallel:
            settings["rules"] = WHOLE_ATTENTION.get(family)
        with Engine(model(family), parallel, **settings) as engine:
            loss = engine.train_step(engine.shard_batch(batch()))
            assert engine.last is not None and engine.last.grad_norm is not None
            found.append(([loss, engine.last.grad_norm], engine.full_state_dict()))
    return found


def compare(count: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    wanted = steps([(family, {}) for family, _ in cases])
    for case, one, other in zip(cases, run_on_ranks(count, steps, cases)[0], wanted, strict=True):
        assert one[0] == pytest.approx(other[0], rel=TOLERANCE), case
        for name, value in other[1].items():
            assert float((one[1][name] - value).abs().max()) <= TOLERANCE, (case, name)


def test_every_family_over_two_ranks() -> None:
    cases: list[tuple[str, dict[str, Any]]]
    cases = [(family, dict(data=2, expert=2)) for family in FAMILIES]
    # Interleaved gates, biases and transposed weights; and none of these.
    cases += [(family, dict(data=2, expert=dict(size=1, tensor=2))) for family in ("gpt-oss", "mixtral")]
    # Whole on each rank, which has tokens of its own.
    cases += [("mixtral", dict(sequence=dict(mode="ring", size=2)))]
    compare(2, cases)


ZERO = dict(stage=3, placement="cuda")
ENTRIES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "some": [
        ("mixtral", dict(data=2, expert=4, tensor=2, zero=ZERO)),
        ("qwen3", dict(data=2, expert=2, tensor=2, sequence=dict(mode="megatron"))),
        ("deepseek", dict(data=2, expert=2, pipeline=2)),
        ("qwen2", dict(expert=2, tensor=dict(mode="2d", size=4))),
    ],
    "others": [
        ("deepseek", dict(data=2, expert=4, tensor=2)),
        ("gpt-oss", dict(data=2, expert=2, tensor=2, zero=ZERO)),
        ("olmoe", dict(data=2, expert=2, tensor=2)),
        ("mixtral", dict(data=2, pipeline=2, zero=ZERO)),
    ],
}


@pytest.mark.parametrize("which", ["some", pytest.param("others", marks=pytest.mark.slow)])
def test_a_family_with_each_other_entry(which: str) -> None:
    compare(4, ENTRIES[which])


def test_transformers_balance_loss_is_refused_beside_tensor() -> None:
    made = model("mixtral")
    made.config.output_router_logits = True
    with pytest.raises(SpecError, match=r"config.output_router_logits=True .* Set it to False, or leave tensor out"):
        Engine(made, dict(tensor=1, expert=1))


class Balanced(torch.nn.Module):
    """A model of transformers whose loss counts on its routers' balance."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model("qwen3")
        keep_routing(self.model)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.model(input_ids=input_ids, labels=labels, use_cache=False)
        return dict(loss=output.loss + 0.2 * balance_loss(self), logits=output.logits)


def notes(taken: bool) -> list[str]:
    """Return warnings about balance losses that an engine gives."""
    made = model("mixtral")
    made.config.output_router_logits = taken
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Engine(made, dict(data=2, expert=2)).close()
    return [str(w.message) for w in caught if "balance loss" in str(w.message)]


def test_a_balance_loss_of_a_ranks_own_tokens_is_warned_of_if_it_is_taken() -> None:
    assert run_on_ranks(2, notes, False)[0] == []
    [note] = run_on_ranks(2, notes, True)[0]
    assert note.startswith("router_aux_loss_coef=")


def balanced(parallel: dict[str, Any]) -> tuple[float, Tensor]:
    with Engine(Balanced(), parallel, optimizer=dict(name="sgd", lr=1.0), precision="fp64") as engine:
        loss = engine.train_step(engine.shard_batch(batch()))
        return loss, engine.full_state_dict()["model.model.layers.0.mlp.gate.weight"]


def test_the_balance_of_transformers_routers_is_that_of_the_global_batch() -> None:
    loss, router = balanced({})
    for parallel in (dict(data=2), dict(data=2, expert=2)):
        found, other = run_on_ranks(2, balanced, parallel)[0]
        assert found == pytest.approx(loss, rel=TOLERANCE)
        assert float((other - router).abs().max()) <= TOLERANCE, parallel
