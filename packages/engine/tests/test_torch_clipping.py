"""torch's own clipping on the parameters of an engine: the norm over all shards, or an error, never silence."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from meshfold.engine import Engine, TrainingError
from meshfold.mesh.testing import ranks

SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "tensor": dict(tensor=2),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 2": dict(data=2, zero=dict(stage=2)),
    "zero 3": dict(data=2, zero=dict(stage=3)),
    "tensor and zero 3": dict(tensor=2, data=1, zero=dict(stage=3)),
    "zero 3 on the host": dict(data=2, zero=dict(stage=3, placement="cpu")),
}
RULES = {"up": "column", "down": "row", "head": "replicate"}


class Net(nn.Module):
    """An MLP beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return out


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (3 * torch.randn(4, 6, generator=generator).double(), torch.randn(4, 2, generator=generator).double())
        for _ in range(3)
    ]


def by_norm(parameters: list[Tensor]) -> list[float]:
    return [float(clip_grad_norm_(parameters, 0.3))]


def by_norm_in_lists(parameters: list[Tensor]) -> list[float]:
    return [float(clip_grad_norm_(iter(parameters), 0.3, foreach=True))]


def by_largest(parameters: list[Tensor]) -> list[float]:
    return [float(clip_grad_norm_(parameters, 0.2, norm_type=math.inf, error_if_nonfinite=True))]


def in_groups(parameters: list[Tensor]) -> list[float]:
    return [float(clip_grad_norm_(parameters[:2], 0.2)), float(clip_grad_norm_(parameters[2:], 0.1))]


def by_value(parameters: list[Tensor]) -> list[float]:
    clip_grad_value_(parameters, 0.05)
    return [float(get_total_norm([p.grad for p in parameters if p.grad is not None]))]


def by_value_in_lists(parameters: list[Tensor]) -> list[float]:
    clip_grad_value_(parameters, 0.05, foreach=True)
    return [float(parameters[0].grad.norm())]  # type: ignore[union-attr]


def by_hand(parameters: list[Tensor]) -> list[float]:
    norm = clip_grad_norm_(parameters, 0.3)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
        parameter.grad /= 4
    return [float(norm), float(get_total_norm([p.grad for p in parameters if p.grad is not None], 1.0))]


WAYS: dict[str, Callable[[list[Tensor]], list[float]]] = {
    way.__name__: way
    for way in (by_norm, by_norm_in_lists, by_largest, in_groups, by_value, by_value_in_lists, by_hand)
}


def serial(way: Callable[[list[Tensor]], list[float]]) -> tuple[list[float], dict[str, Tensor]]:
    model = net()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    for x, y in batches():
        nn.functional.mse_loss(model(x), y).backward()
        found += way(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return found, dict(model.state_dict())


@pytest.mark.few(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", SPECS)
@ranks(2)
def test_clipping_by_torch_equals_a_single_process(spec: str, way: str) -> None:
    expected, weights = serial(WAYS[way])
    optimizer = dict(name=torch.optim.SGD, lr=0.5, momentum=0.9)
    with Engine(net(), SPECS[spec], optimizer=optimizer, precision="fp64", rules=RULES) as engine:
        found = []
        for batch in batches():
            x, y = engine.shard_batch(batch)
            engine.backward(nn.functional.mse_loss(engine(x), y))
            found += WAYS[way](list(engine.model.parameters()))
            assert engine.step()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(engine.full_state_dict(), weights)


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda g: g.mean(),
    "mean over a dim": lambda g: g.mean(0),
    "norms of rows": lambda g: g.norm(dim=-1),
    "sum of squares": lambda g: g.square().sum() + (g * g).sum(),
    "largest": lambda g: g.abs().max(),
    "spread": lambda g: g.std(),
    "first element": lambda g: g.clone().flatten()[0],
    "are finite": lambda g: torch.isfinite(g).all(),
    "all of it": lambda g: g.clone(),
}


@ranks(2)
def test_what_reads_a_gradient_reads_the_whole_of_it() -> None:
    """Under tensor a rank has a part of most parameters, and what it read of that alone was silently wrong."""
    model, (x, y) = net(), batches()[0]
    nn.functional.mse_loss(model(x), y).backward()
    for spec in ("data", "tensor"):
        with Engine(net(), SPECS[spec], optimizer="sgd", precision="fp64", rules=RULES) as engine:
            mine, target = engine.shard_batch((x, y))
            engine.backward(nn.functional.mse_loss(engine(mine), target))
            for (name, serial), parameter in zip(model.named_parameters(), engine.model.parameters(), strict=True):
                assert serial.grad is not None and parameter.grad is not None
                for what, read in READS.items():
                    torch.testing.assert_close(read(parameter.grad), read(serial.grad), msg=f"{spec}, {name}: {what}")
            weight = engine.model.get_parameter("up.weight")
            assert weight.grad is not None
            if spec == "data":
                assert float((weight.detach() * weight.grad).sum()) != 0.0
                continue
            with pytest.raises(
                TrainingError, match=r"this rank has \(4, 6\) of a parameter \(8, 6\): parameter\.grad\.clone"
            ):
                weight.detach() * weight.grad
            total = torch.zeros_like(weight).add_(weight.grad, alpha=2.0)  # on this rank's part
            whole = model.get_parameter("up.weight").grad
            assert whole is not None
            torch.testing.assert_close(total, 2.0 * whole.chunk(2)[engine.mesh.index("tensor")])


HALVES: dict[str, Any] = {"bf16": "bf16", "fp16": dict(name="fp16", initial_scale=2**8)}


@pytest.mark.few(4)
@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("spec", ["data", "tensor", "zero 1", "zero 3"])
@ranks(2)
def test_in_16_bits_the_norm_is_of_unscaled_gradients(spec: str, precision: str) -> None:
    model, (x, y) = net(), batches()[0]
    nn.functional.mse_loss(model(x), y).backward()
    norm = float(clip_grad_norm_(model.parameters(), 0.3))
    adamw = dict(name="adamw", lr=0.01)
    with Engine(net(), SPECS[spec], optimizer=adamw, precision=HALVES[precision], rules=RULES) as engine:
        mine, target = engine.shard_batch((x, y))
        engine.backward(nn.functional.mse_loss(engine(mine).float(), target.float()))
        found = float(clip_grad_norm_(engine.model.parameters(), 0.3))
        assert found == pytest.approx(norm, rel=0.05)
        assert engine.step()
        assert engine.last is not None
        assert engine.last.grad_norm == pytest.approx(0.3, rel=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", ["data", "zero 3"])
@ranks(2)
def test_a_step_that_overflows_is_left_out_clipped_or_not(spec: str) -> None:
    high = dict(name="fp16", initial_scale=2.0**24)
    with Engine(net(), SPECS[spec], optimizer=dict(name="sgd", lr=0.1), precision=high) as engine:
        x, y = engine.shard_batch(batches()[0])
        engine.backward(nn.functional.mse_loss(engine(x).float(), y.float()))
        assert not math.isfinite(float(clip_grad_norm_(engine.model.parameters(), 0.3)))
        assert not engine.step()


@pytest.mark.few(2)
@pytest.mark.parametrize("spec", ["data", "zero 1", "zero 3"])
@ranks(2)
def test_clipping_sums_what_no_sync_has_kept_apart(spec: str) -> None:
    model, both = net(), batches()[:2]
    for x, y in both:
        (nn.functional.mse_loss(model(x), y) / 2).backward()
    norm = float(clip_grad_norm_(model.parameters(), 0.3))
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    optimizer = dict(name=torch.optim.SGD, lr=0.5)
    with Engine(net(), SPECS[spec], optimizer=optimizer, precision="fp64") as engine:
        with engine.no_sync():
            for batch in both:
                x, y = engine.shard_batch(batch)
                engine.backward(nn.functional.mse_loss(engine(x), y) / 2)
        assert float(clip_grad_norm_(engine.model.parameters(), 0.3)) == pytest.approx(norm)
        with pytest.raises(TrainingError, match="after the gradients were clipped and before step"):
            engine(x)
        engine.step()
        torch.testing.assert_close(engine.full_state_dict(), dict(model.state_dict()))


GONE: dict[str, tuple[Callable[[list[nn.Parameter]], object], str]] = {
    "norm": (
        lambda p: clip_grad_norm_(p, 1.0),
        r"the norm .* no gradients now: .* Engine\(\.\.\., clip_grad_norm=1\.0\)",
    ),
    "value": (lambda p: clip_grad_value_(p, 1.0), "clipping the values .* no gradients now"),
    "total": (lambda p: float(get_total_norm([x.grad for x in p if x.grad is not None])), "no gradients now"),
    "elements": (lambda p: [x.grad.abs() for x in p if x.grad is not None], "abs.* no gradients now"),
    "an optimizer of one's own": (lambda p: torch.optim.SGD(p, lr=0.1).step(), "no gradients now"),
}


@pytest.mark.parametrize("what", GONE)
@pytest.mark.parametrize("spec", ["data", "zero 3"])
@ranks(2)
def test_after_a_train_step_nothing_is_clipped_in_silence(spec: str, what: str) -> None:
    ask, message = GONE[what]
    with Engine(net(), SPECS[spec], optimizer=dict(name="sgd", lr=0.1), loss_fn=own_loss) as engine:
        engine.train_step(engine.shard_batch(batches()[0]))
        engine.model.zero_grad(set_to_none=False)  # means nothing, and does nothing
        with pytest.raises(TrainingError, match=message):
            ask(list(engine.model.parameters()))
        assert math.isfinite(engine.train_step(engine.shard_batch(batches()[1])))


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@ranks(2)
def test_elements_are_read_whole_and_written_in_this_ranks_block(precision: str) -> None:
    model, (x, y) = net(), batches()[0]
    nn.functional.mse_loss(model(x), y).backward()
    assert model.up.weight.grad is not None
    wanted = model.up.weight.grad
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=0.1), precision=precision, rules=RULES)
    for spec in ("data", "tensor"):
        with Engine(net(), SPECS[spec], **settings) as engine:
            mine, target = engine.shard_batch((x, y))
            engine.backward(nn.functional.mse_loss(engine(mine).to(target), target))
            found = engine.model.up.weight.grad  # type: ignore[union-attr]
            assert isinstance(found, Tensor)
            far = 1e-12 if precision == "fp64" else 0.1
            torch.testing.assert_close(found.clone().double(), wanted, rtol=far, atol=far)
            found.add_(1.0)
            torch.testing.assert_close(found.clone().double(), wanted + 1, rtol=far, atol=far)
            engine.model.up.weight.grad = torch.zeros_like(engine.model.up.weight)  # type: ignore[union-attr]
            with pytest.raises(TrainingError, match="was assigned before step"):
                engine.step()
    with Engine(net(), dict(data=2, zero=dict(stage=1)), **settings) as engine:
        mine, target = engine.shard_batch((x, y))
        engine.backward(nn.functional.mse_loss(engine(mine).to(target), target))
        with pytest.raises(TrainingError, match=r"clone.* sharded in chunks"):
            engine.model.up.weight.grad.clone()  # type: ignore[union-attr]


@pytest.mark.parametrize("none", [False, True])
def test_an_assigned_gradient_is_refused_where_nobody_looked_at_the_gradients_before(none: bool) -> None:
    model, (x, y) = net(), batches()[0]
    with Engine(model, optimizer=dict(name="sgd", lr=0.1), precision="fp64") as engine:
        engine.backward(nn.functional.mse_loss(engine(x), y))
        model.up.weight.grad = None if none else torch.zeros_like(model.up.weight)
        with pytest.raises(TrainingError, match="was assigned before step"):
            engine.step()


def test_gradients_from_before_the_engine_do_not_count() -> None:
    model, (x, y) = net(), batches()[0]
    model(x).sum().backward()
    with Engine(model, optimizer=dict(name="sgd", lr=0.0), precision="fp64") as engine:
        engine.backward(nn.functional.mse_loss(engine(x), y))
        norm = float(clip_grad_norm_(engine.model.parameters(), 1e9))
    other = net()
    nn.functional.mse_loss(other(x), y).backward()
    assert norm == pytest.approx(float(clip_grad_norm_(other.parameters(), 1e9)))


def own_loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.mse_loss(output, batch[1].to(output))


def test_gradients_that_an_engine_has_are_not_cleared_behind_its_back() -> None:
    engine = Engine(net(), optimizer=dict(name="sgd", lr=0.1), precision="fp64")
    x, y = batches()[0]
    engine.backward(nn.functional.mse_loss(engine(x), y))
    with pytest.raises(TrainingError, match=r"call engine\.zero_grad\(\)"):
        engine.model.zero_grad(set_to_none=False)
    engine.zero_grad()
    engine.close()


@pytest.mark.parametrize("parallel", [{}, dict(zero=dict(stage=3))], ids=["plain", "zero"])
def test_a_backward_of_somebody_else_changes_nothing(parallel: dict[str, Any]) -> None:
    """As a generator's loss goes through the discriminator."""
    engine = Engine(net(), parallel, optimizer=dict(name="sgd", lr=0.1), precision="fp64")
    x, y = batches()[0]
    engine.backward(nn.functional.mse_loss(engine(x), y))
    parameters = list(engine.model.parameters())
    norm = float(get_total_norm([p.grad for p in parameters if p.grad is not None]))
    source = x.clone().requires_grad_()
    engine.model(source).sum().backward()
    assert source.grad is not None
    assert float(clip_grad_norm_(parameters, 1e9)) == pytest.approx(norm)
    engine.close()


def test_a_model_that_no_engine_has_any_more_is_torchs_again() -> None:
    model = net()
    x, y = batches()[0]
    for ends in (Engine.close, lambda engine: None):
        engine = Engine(model, optimizer=dict(name="sgd", lr=0.1), precision="fp64")
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        ends(engine)
        del engine
        gc.collect()
        assert all(p.grad is None for p in model.parameters())
        nn.functional.mse_loss(model(x), y).backward()
        assert float(clip_grad_norm_(model.parameters(), 0.1)) > 0.1
        model.zero_grad()
