"""Buffers that a forward changes in a pipeline: as with accumulation in one process, and a warning that names them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


class Centred(nn.Module):
    """Subtracts an average of what it has seen; over all ranks if it is asked to. It counts, and has a weight of norm one."""

    def __init__(self, averages: bool) -> None:
        super().__init__()
        self.averages, self.head = averages, nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean(0)
            if self.averages:
                mean = mean / dist.get_world_size()
                dist.all_reduce(mean)
            self.seen.lerp_(mean.to(self.seen), 0.5)
            self.calls += 1
        return self.head(x - self.seen)  # type: ignore[no-any-return]


@pytest.mark.few(2)
@pytest.mark.parametrize("zero", [{}, dict(zero=dict(stage=3))], ids=["data", "zero 3"])
@pytest.mark.parametrize("averages", [False, True])
@ranks(2)
def test_a_buffer_that_data_ranks_change_differently_is_named(averages: bool, zero: dict[str, Any]) -> None:
    torch.manual_seed(0)
    optimizer = dict(name="sgd", lr=0.1)
    with Engine(
        Centred(averages),
        dict(data=2, **zero),
        optimizer=optimizer,
        precision="fp64",
        loss_fn=lambda y, batch: (y - batch[1]).square().mean(),
    ) as engine:
        batch = engine.shard_batch((X, Y))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                engine.train_step(batch)
    said = [str(one.message) for one in caught if "changes the buffer" in str(one.message)]
    assert len(said) == (dist.get_rank() == 0 and not averages)
    assert not said or ("'seen' by the rows" in said[0] and "all_reduce" in said[0])
