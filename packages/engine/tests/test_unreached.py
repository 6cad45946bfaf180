"""A rank whose own loss depends on nothing that is trained: its gradient counts as zero, and nobody waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.mesh import CollectiveError
from meshfold.mesh.testing import close_pools, ranks, run_on_ranks
from meshfold.mesh.watchdog import diagnosis
from meshfold.zero_gemini import ChunkError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 2": dict(data=2, zero=dict(stage=2)),
    "zero 2 on the host": dict(data=2, zero=dict(stage=2, placement="cpu")),
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def loss_of(model: Any, rank: int) -> Tensor:
    """Rank 1 has no row that counts, and a zero of its own for a loss."""
    loss: Tensor = model(X).square().mean()
    return loss if rank == 0 else torch.zeros((), requires_grad=True) * 1.0


@pytest.mark.few(6)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("optimizer", [dict(name="adamw", lr=0.1), dict(name="sgd", lr=0.1)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("spec", SPECS)
@ranks(2)
def test_its_gradient_counts_as_zero(spec: str, optimizer: dict[str, Any], backwards: int) -> None:
    engine = Engine(net, SPECS[spec], optimizer=optimizer, precision="fp64", watchdog=100.0)
    serial = net().double()
    serial.load_state_dict(engine.full_state_dict())
    kind = torch.optim.AdamW if optimizer["name"] == "adamw" else torch.optim.SGD
    steps = kind(serial.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(backwards):
            (loss_of(serial, 0) / 2).backward()  # the mean over two ranks
            engine.backward(loss_of(engine, engine.mesh.rank))
        steps.step()
        steps.zero_grad()
        engine.step()
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, serial.state_dict()[name], rtol=1e-9, atol=1e-9)
    engine.close()


class Late(nn.Module):
    """Its table is read without gradients, and so is called first and never reached by backward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.table(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, 3])
@ranks(2)
def test_a_table_that_is_read_without_gradients(stage: int) -> None:
    """The second step began with a sum of its gradient, before any unit was entered."""
    ids = torch.arange(8).view(2, 4)
    spec = dict(data=2, zero=dict(stage=stage))
    with Engine(Late, spec, optimizer=dict(name="sgd", lr=0.1), precision="fp64") as engine:
        serial = Late().double()
        serial.load_state_dict(engine.full_state_dict())
        for _ in range(3):
            loss = serial(ids)
            loss.backward()
            found = engine.train_step({"ids": ids.chunk(2)[engine.mesh.index("data")]})
            assert abs(found - float(loss.detach())) < 1e-9
            with torch.no_grad():
                for parameter in serial.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
        torch.testing.assert_close(engine.full_state_dict(), dict(serial.state_dict()), rtol=1e-9, atol=1e-9)


def stage_3() -> str:
    diagnosis._BEAT_S = 0.1  # of this pool's ranks, which end after the test
    engine = Engine(net, dict(data=2, zero=dict(stage=3)), optimizer="sgd", precision="fp64", watchdog=300.0)
    try:
        engine.backward(loss_of(engine, engine.mesh.rank))
        engine.step()
    except (ChunkError, CollectiveError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_where_parameters_come_and_go_all_hear_what_to_do() -> None:
    close_pools()  # ranks of other tests have had errors of their own
    try:
        waited, unreached = run_on_ranks(2, stage_3)
    finally:
        close_pools()  # its connections are broken now
    assert unreached.startswith("ChunkError: this rank's loss depends on no parameter that is trained")
    assert waited.startswith("CollectiveError: rank 1 failed") and "loss + 0 * output.sum()" in waited
