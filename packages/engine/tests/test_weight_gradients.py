"""A loss that is computed with gradients of weights is warned of over data ranks, and is that of one process once they average."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.engine.batches.weight_gradients import WATCHED
from meshfold.mesh.testing import ranks

X = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 2": dict(data=2, zero=dict(stage=2)),
}
RATE = 0.5
WARNING = "the loss is computed with gradients of weights"
Penalty = Callable[[nn.Module, Tensor, Tensor], Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def of_weights(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """A penalty on the gradient of this rank's rows."""
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    return sum((one.square().sum() for one in gradients), loss.new_zeros(()))


def of_averaged(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """A penalty on the gradient of all rows."""
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    return sum((all_reduce(one / 2).square().sum() for one in gradients), loss.new_zeros(()))


def of_inputs(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """A penalty on the gradient of each row."""
    x = x.detach().requires_grad_()
    [gradient] = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.square().sum(1).mean()


def looked_at(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    """No penalty: the gradient is only looked at."""
    assert all(one.isfinite().all() for one in torch.autograd.grad(loss, [*model.parameters()], create_graph=True))
    return loss.new_zeros(())


def nothing(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return loss.new_zeros(())


def loss_of(model: nn.Module, x: Tensor, penalty: Penalty) -> Tensor:
    loss = F.mse_loss(model(x), x.flip(1))
    return loss + penalty(model, x, loss)


def after_steps(spec: dict[str, Any], penalty: Penalty, *, loop: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights after three steps, and the warnings."""
    model = network()

    def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, batch[0], penalty) + 0.0 * output.sum()

    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=RATE), precision="fp64", kernels="off")
    with warnings.catch_warnings(record=True) as found, Engine(model, spec, loss_fn=loss_fn, **settings) as engine:
        warnings.simplefilter("always")
        for _ in range(3):
            if loop:
                x = engine.shard_batch(X)
                engine(x)
                engine.backward(loss_of(engine.model, x, penalty))
                engine.step()
            else:
                engine.train_step(engine.shard_batch((X, X)))
        weights = engine.full_state_dict()
    return weights, [str(one.message) for one in found if WARNING in str(one.message)]


def serial(penalty: Penalty) -> dict[str, Tensor]:
    model = network()
    for _ in range(3):
        model.zero_grad()
        loss_of(model, X, penalty).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad  # type: ignore[operator]
    return model.state_dict()


def is_serial(found: dict[str, Tensor], penalty: Penalty) -> bool:
    return all(torch.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in serial(penalty).items())


@pytest.mark.few(2)
@pytest.mark.parametrize("loop", [False, True], ids=["train_step", "loop"])
@pytest.mark.parametrize("spec", SPECS)
@ranks(2)
def test_a_penalty_on_gradients_of_weights_is_warned_of(spec: str, loop: bool) -> None:
    found, warned = after_steps(SPECS[spec], of_weights, loop=loop)
    assert not is_serial(found, of_weights)  # else the warning would be wrong
    assert len(warned) == (1 if torch.distributed.get_rank() == 0 else 0)
    averaged, quiet = after_steps(SPECS[spec], of_averaged, loop=loop)
    assert is_serial(averaged, of_weights) and not quiet  # what the warning says to write


@pytest.mark.few(4)
@pytest.mark.parametrize("loop", [False, True], ids=["train_step", "loop"])
@pytest.mark.parametrize("penalty", [of_inputs, looked_at, nothing])
@ranks(2)
def test_other_losses_are_not(penalty: Penalty, loop: bool) -> None:
    for spec in SPECS.values():
        found, warned = after_steps(spec, penalty, loop=loop)
        assert is_serial(found, penalty) and not warned


@pytest.mark.parametrize("loop", [False, True], ids=["train_step", "loop"])
def test_one_process_is_not(loop: bool) -> None:
    found, warned = after_steps({}, of_weights, loop=loop)
    assert is_serial(found, of_weights) and not warned


@ranks(2)
def test_hooks_stay_for_the_first_losses() -> None:
    model = network()
    with Engine(model, dict(data=2), optimizer=dict(name="sgd", lr=RATE), precision="fp64") as engine:
        x = engine.shard_batch(X)
        for _ in range(WATCHED):
            engine.backward(engine(x).square().mean())
            engine.step()
            assert all(parameter._backward_hooks for parameter in model.parameters())
        engine.backward(engine(x).square().mean())
        assert not any(parameter._backward_hooks for parameter in model.parameters())
    with Engine(network(), dict(data=2), optimizer=dict(name="sgd", lr=RATE), precision="fp64") as other:
        closed = other.model
    assert not any(parameter._backward_hooks for parameter in closed.parameters())
