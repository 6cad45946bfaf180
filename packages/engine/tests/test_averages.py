"""Moving averages of weights under every kind of spec, through checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine, TrainingError, averaged_state_dict, averaged_weights
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import build

IDS = torch.arange(64).view(4, 16) % 11
DECAY, STEPS = 0.6, 5


def engine_of(spec: dict[str, Any], name: str = "adamw", **settings: Any) -> Engine:
    torch.manual_seed(0)
    optimizer = dict(name=name, lr=1e-2, average=DECAY, **settings)
    return Engine(build("gpt-tiny").double(), spec, precision="fp64", optimizer=optimizer)


def by_hand(name: str, ramp: bool) -> dict[str, Tensor]:
    """Averages of the weights that torch's own optimizer makes."""
    torch.manual_seed(0)
    model = build("gpt-tiny").double()
    made: Any = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
    optimizer, averages = made(model.parameters(), lr=1e-2), dict[str, Tensor]()
    for step in range(1, STEPS + 1):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        decay = 0.0 if step == 1 else min(DECAY, step / (9 + step) if ramp else 1.0)
        for key, value in model.state_dict().items():
            averages[key] = decay * averages.get(key, torch.zeros(())) + (1 - decay) * value
    return averages


def compare(spec: dict[str, Any], name: str = "adamw", ramp: bool = True) -> None:
    wanted = by_hand(name, ramp)
    with engine_of(spec, name, **({} if ramp else dict(average_ramp=False))) as engine:
        for _ in range(STEPS):
            engine.train_step(engine.shard_batch(IDS))
        found, before = averaged_state_dict(engine), engine.full_state_dict()
        with averaged_weights(engine):
            inside = engine.full_state_dict()
        after = engine.full_state_dict()
    assert list(found) == list(before)
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-9), key
        assert torch.equal(inside[key], found[key])
        assert torch.equal(after[key], before[key])
    assert any((before[key] - found[key]).abs().max() > 1e-4 for key in wanted)


SPECS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, dict(data=2)),
    "tensor": (2, dict(tensor=2)),
    "2d": (4, dict(tensor=dict(mode="2d", grid=(2, 2)))),
    "zero 1": (2, dict(data=2, zero=dict(stage=1))),
    "zero 3": (2, dict(data=2, zero=dict(stage=3))),
    "host": (2, dict(data=2, zero=dict(stage=3, placement="cpu"))),
    "pipeline": (2, dict(pipeline=2)),
}


def test_averages_in_one_process() -> None:
    for name in ("adamw", "sgd"):
        for ramp in (True, False):
            compare({}, name, ramp)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", SPECS)
def test_averages_of_ranks_are_those_of_one_process(how: str) -> None:
    size, spec = SPECS[how]
    run_on_ranks(size, compare, spec)


def save_and_resume(first: dict[str, Any], second: dict[str, Any], folder: str) -> None:
    wanted = by_hand("adamw", ramp=True)
    with engine_of(first) as engine:
        for _ in range(2):
            engine.train_step(engine.shard_batch(IDS))
        engine.save(folder)
    with engine_of(second) as engine:
        engine.load(folder)
        for _ in range(STEPS - 2):
            engine.train_step(engine.shard_batch(IDS))
        found = averaged_state_dict(engine)
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-9), key


def test_averages_go_on_from_a_checkpoint_of_another_spec(tmp_path: Path) -> None:
    run_on_ranks(2, save_and_resume, SPECS["zero 3"][1], SPECS["tensor"][1], str(tmp_path / "saved"))


def test_refused() -> None:
    for wrong in (dict(name="muon", average=0.9), dict(name="lamb", lr=1e-3, average=0.9)):
        with pytest.raises(SpecError, match="step on each element by itself"):
            Engine(build("gpt-tiny"), optimizer=wrong)
    for average in (1.0, 0, "much", True):
        with pytest.raises(SpecError, match="decay of the weights' moving average, between 0 and 1"):
            Engine(build("gpt-tiny"), optimizer=dict(name="adamw", average=average))
    with (
        Engine(build("gpt-tiny"), optimizer="sgd") as engine,
        pytest.raises(TrainingError, match=r"average=0\.9999"),
    ):
        averaged_state_dict(engine)
