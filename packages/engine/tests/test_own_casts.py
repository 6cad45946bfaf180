"""A layer that its module's own forward casts keeps its weights as the engine trains them, and multiplies in the other dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh.testing import ranks

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Router(nn.Module):
    """A router as transformers' of Switch Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float32)
        found: Tensor = self.classifier(x.to(torch.float32))
        return found.softmax(-1).to(x.dtype)


class Casting(Router):
    """The same, with a cast of the weight instead of the layer."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.classifier
        found = F.linear(x.float(), layer.weight.float(), layer.bias.float())
        return found.softmax(-1).to(x.dtype)


class Net(nn.Module):
    def __init__(self, router: type[Router]) -> None:
        super().__init__()
        self.proj, self.router, self.out = nn.Linear(8, 8), router(), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.router(self.proj(x)))


def mean_square(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[0]).square().mean()


def trained(router: type[Router], parallel: dict[str, Any], precision: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=0.1), loss_fn=mean_square, precision=precision)
    with Engine(Net(router), parallel, **settings) as engine:
        x = X if precision == "fp64" else X.float()
        losses = [engine.train_step(engine.shard_batch((x, x))) for _ in range(3)]
        return losses, engine.full_state_dict()


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("spec", [dict(data=2), dict(zero=dict(stage=2)), dict(zero=dict(stage=3))], ids=str)
@ranks(2)
def test_a_layer_that_a_forward_casts_trains_as_its_weights_cast(spec: dict[str, Any], precision: str) -> None:
    (want, weights), (got, others) = (trained(router, spec, precision) for router in (Casting, Router))
    assert got == want
    for name, value in weights.items():
        assert value.dtype == others[name].dtype and torch.equal(value, others[name]), name


def test_such_a_layer_can_still_be_moved_and_is_restored() -> None:
    net = Net(Router)
    with Engine(net, {}, optimizer=dict(name="sgd", lr=0.1), loss_fn=mean_square, precision="fp64") as engine:
        layer = engine.model.router.classifier
        assert layer.to(torch.float32) is layer and layer.weight.dtype == torch.float64
        assert layer.to(device="cpu", dtype=torch.float64) is layer
