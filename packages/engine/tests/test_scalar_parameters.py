"""A scalar parameter's moments have the shape of a number: a checkpoint gives them back as moments, and numbers as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh.parameters import OptimizerProbeError, number_keys
from meshfold.mesh.testing import run_on_ranks

OPTIMIZERS = ("SGD", "Adagrad", "RMSprop", "NAdam", "ASGD", "Adadelta", "Rprop", "RAdam", "Adamax", "adamw")


class Scaled(nn.Module):
    """A linear layer behind factors of shapes ``()`` and ``(1,)``."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(3, 2, bias=False)
        self.linear.weight = nn.Parameter(torch.randn(2, 3, generator=generator))
        self.scale, self.one = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([1.3]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x * self.scale) * self.one
        return found


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output, batch[1])


def optimizer(name: str) -> dict[str, Any]:
    more = dict(momentum=0.9) if name == "SGD" else {}
    return dict(name=name if name == "adamw" else getattr(torch.optim, name), lr=0.05, **more)


def going_on(folder: str, first: Mapping[str, Any], then: Mapping[str, Any], names: tuple[str, ...]) -> None:
    batches = torch.randn((6, 2, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name in names:
        found = []
        for parallel in (first, then):
            with Engine(Scaled, parallel, optimizer=optimizer(name), precision="fp64", loss_fn=loss) as engine:
                if parallel is then:
                    engine.load(f"{folder}/{name}")
                for batch in batches[:3] if parallel is first else ():
                    engine.train_step((batch, batch[:, :2]))
                if parallel is first:
                    engine.save(f"{folder}/{name}")
                for batch in batches[3:]:
                    engine.train_step((batch, batch[:, :2]))
                found.append(engine.full_state_dict())
        for key, value in found[0].items():
            # torch casts NAdam's float32 product of momenta when it loads.
            torch.testing.assert_close(found[1][key], value, rtol=1e-7, atol=1e-7, msg=f"{name}: {key}")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (dict(zero=dict(stage=1)), dict(zero=dict(stage=2, placement="cpu"))),
        ({}, dict(zero=dict(stage=1))),
        (dict(zero=dict(stage=1)), {}),
    ],
    ids=["zero to zero", "to zero", "from zero"],
)
def test_a_run_goes_on_with_every_optimizer(tmp_path: Path, first: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    run_on_ranks(1, going_on, str(tmp_path), first, then, OPTIMIZERS)


def test_the_numbers_of_an_optimizer_are_told_from_its_moments() -> None:
    def of(name: str, **settings: Any) -> frozenset[str]:
        return number_keys(getattr(torch.optim, name)([nn.Parameter(torch.ones(3))], lr=0.1, **settings))

    assert of("SGD", momentum=0.9) == frozenset()
    assert of("Adagrad") == of("AdamW", amsgrad=True) == {"step"}
    assert of("NAdam") == {"step", "mu_product"}


class Sums(torch.optim.SGD):
    """Takes matrices alone."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad @ parameter.grad.T @ parameter.grad[0, 0]


def test_an_optimizer_that_cannot_be_tried_is_told_what_to_change() -> None:
    with pytest.raises(OptimizerProbeError, match=r"Sums could not be tried out.* the shape \(1,\)"):
        number_keys(Sums([nn.Parameter(torch.ones(3, 3))], lr=0.1))
