"""A checkpoint is taken whole or not at all: not with gradients of the weights before, nor without its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import CheckpointError, Engine
from meshfold.mesh.testing import ranks

BATCH = torch.ones(2, 4), torch.zeros(2, 4)
OTHER = 10 * torch.ones(2, 4), torch.zeros(2, 4)
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 2": dict(data=2, zero=dict(stage=2)),
    "zero 3": dict(data=2, zero=dict(stage=3)),
}


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch[1].to(output.dtype))  # torch 2.11 has no backward for two dtypes


def engine_of(spec: str, optimizer: str = "sgd", seed: int = 0) -> Engine:
    return Engine(
        lambda: nn.Sequential(nn.Linear(4, 4)),
        SPECS[spec],
        optimizer=dict(name=optimizer, lr=0.1),
        loss_fn=loss,
        gradient_accumulation=2,
        precision="fp64",
        seed=seed,
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@ranks(2)
def test_gradients_since_the_last_step_are_let_go(spec: str, weights_only: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    amid, fresh = engine_of(spec), engine_of(spec)
    amid.save(path)
    amid.train_step(OTHER)  # the first micro-step of two
    amid.load(path, weights_only=weights_only)
    fresh.load(path, weights_only=weights_only)
    losses = [[engine.train_step(BATCH) for _ in range(4)] for engine in (amid, fresh)]
    assert losses[0] == losses[1] and losses[0][0] == losses[0][1] > losses[0][2] == losses[0][3]
    assert amid.steps == fresh.steps == 2
    amid.close()
    fresh.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", ["data", "zero 3"])
@ranks(2)
def test_with_the_state_of_another_optimizer_the_weights_are_not_taken(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    saved, other = engine_of(spec), engine_of(spec, "adamw", seed=1)
    saved.save(path)
    before = other.full_state_dict()
    with pytest.raises(CheckpointError, match="has the state of SGD, but this engine has AdamW"):
        other.load(path)
    after = other.full_state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    other.load(path, weights_only=True)
    wanted = saved.full_state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in other.full_state_dict().items())
    saved.close()
    other.close()
