"""Buffers that a forward changes in a pipeline: as with accumulation in one process, and a warning that names them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.mesh.testing import ranks

X, Y = torch.linspace(-1, 1, 32).view(8, 4).sin(), torch.zeros(8, 4)


class Layer(nn.Module):
    """Counts its calls, keeps an average if it is asked to, and a cache that its first call makes."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.inner, self.changes = nn.Linear(4, 4), changes
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.numel() == 1:
            self.table = torch.ones(4)
        y: Tensor = x + torch.tanh(self.inner(x)) * self.table
        if self.changes:
            with torch.no_grad():
                self.mean.lerp_(y.mean(0).to(self.mean), 0.5)
        return y


class Averaging(nn.Module):
    def __init__(self, changes: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Layer(changes) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def still() -> Averaging:
    return Averaging(changes=False)


def engine_of(make: type[Averaging] | object) -> Engine:
    return Engine(
        make,  # type: ignore[arg-type]
        dict(pipeline=dict(size=2, microbatches=4)),
        optimizer=dict(name="sgd", lr=0.1),
        precision="fp64",
        loss_fn=lambda output, batch: (output - batch[1]).square().mean(),
        example=(X, Y),
    )


@ranks(2)
def test_a_changed_buffer_is_named_and_is_that_of_accumulation() -> None:
    engine = engine_of(Averaging)
    plain = Averaging().double()
    plain.load_state_dict(engine.full_state_dict())
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine.train_step((X, Y))
    with pytest.warns(UserWarning, match=r"changes the buffer '.*mean'.* 4 times a step, once for each micro-batch"):
        engine.train_step((X, Y))
    for _ in range(2):
        for x, y in zip(X.double().chunk(4), Y.double().chunk(4), strict=True):
            ((plain(x) - y).square().mean() / 4).backward()
        steps.step()
        steps.zero_grad()
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.train_step((X, Y))
    engine.close()


@ranks(2)
def test_a_cache_is_no_change() -> None:
    engine = engine_of(still)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            engine.train_step((X, Y))
    engine.close()
