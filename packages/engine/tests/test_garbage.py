"""The garbage collector waits while a step runs, and goes on after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.mesh import collector_paused
from meshfold.mesh.testing import ranks


class Noting(nn.Module):
    """Notes in forward and backward whether the collector is on; its loss can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[bool] = []
        self.fails = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.seen.append(gc.isenabled())
        if self.fails:
            raise ArithmeticError("a loss of the user's")
        y = self.layer(x)
        y.register_hook(lambda grad: self.seen.append(gc.isenabled()))
        return dict(loss=y.square().mean())


@contextmanager
def collecting(on: bool) -> Iterator[None]:
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_as_before_after_any_use(on: bool) -> None:
    with collecting(on):
        with collector_paused():
            assert not gc.isenabled()
            with collector_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled() is on
        with pytest.raises(KeyError), collector_paused():
            raise KeyError
        assert gc.isenabled() is on


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [{}, dict(zero=dict(stage=3))], ids=["plain", "zero 3"])
@ranks(1)
def test_no_collection_within_a_step(spec: dict[str, Any]) -> None:
    model = Noting()
    with collecting(True), Engine(model, spec, optimizer=dict(name="sgd", lr=0.1)) as engine:
        assert engine.optimizer is not None
        optimizer = engine.optimizer
        optimizer.register_step_pre_hook(lambda *_: model.seen.append(gc.isenabled()))
        model.seen.clear()
        engine.train_step(dict(x=torch.randn(2, 4)))
        assert model.seen and not any(model.seen) and gc.isenabled()
        model.seen.clear()
        engine.backward(engine(x=torch.randn(2, 4))["loss"])
        engine.step()
        assert model.seen and not any(model.seen) and gc.isenabled()
        model.fails = True
        with pytest.raises(ArithmeticError, match="of the user's"):
            engine.train_step(dict(x=torch.randn(2, 4)))
        assert gc.isenabled()
