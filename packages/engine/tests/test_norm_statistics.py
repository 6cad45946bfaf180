"""Norms with running statistics in 16 bits: they stay in float32, and train as in a loop written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.colossalai import Booster, GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from meshfold.engine import Engine
from meshfold.mesh import SpecError, all_reduce
from meshfold.mesh.testing import ranks

STEPS, LR = 3, 0.1
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class Pictures(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.blocks = nn.ModuleList(Residual(4) for _ in range(2))
        self.last = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.last(x.mean((2, 3))))
        return out


def net() -> Pictures:
    torch.manual_seed(1)
    return Pictures()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(8, 3, 4, 4, generator=generator), torch.randint(5, (8,), generator=generator))
        for _ in range(STEPS)
    ]


def by_hand(dtype: torch.dtype, halves: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, master weights and the first half's statistics; each half of a batch has statistics of its own."""
    true = net()
    models = [copy.deepcopy(true).to(dtype) for _ in range(halves)]
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.float()
    losses = []
    for x, y in batches():
        total = 0.0
        for model, rows, labels in zip(models, x.chunk(halves), y.chunk(halves), strict=True):
            for mine, whole in zip(model.parameters(), true.parameters(), strict=True):
                mine.data.copy_(whole.data)
                mine.grad = None
            loss = nn.functional.cross_entropy(model(rows.to(dtype)), labels)
            loss.backward()
            total += loss.item() / halves
        with torch.no_grad():
            for whole, *parts in zip(true.parameters(), *(m.parameters() for m in models), strict=True):
                gradients = [part.grad.float() for part in parts if part.grad is not None]
                whole -= LR * sum(gradients) / halves
        losses.append(total)
    return losses, dict(true.named_parameters()), dict(models[0].named_buffers())


SPECS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "data": (2, dict(data=2)),
    "zero 1": (2, dict(data=2, zero=dict(stage=1))),
    "zero 3": (2, dict(data=2, zero=dict(stage=3))),
}


def same(engine: Engine, losses: list[float], dtype: torch.dtype, halves: int) -> None:
    expected, weights, statistics = by_hand(dtype, halves)
    assert losses == pytest.approx(expected, rel=2e-3)
    found = engine.full_state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=2e-2, atol=2e-3)
    for name, statistic in statistics.items():
        assert found[name].dtype == statistic.dtype
        torch.testing.assert_close(found[name], statistic, rtol=1e-2, atol=1e-3)


def loss_of(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def train(precision: str, parallel: dict[str, Any], halves: int) -> None:
    settings: dict[str, Any] = dict(optimizer=dict(name=torch.optim.SGD, lr=LR), precision=precision)
    if precision == "fp16":
        settings["precision"] = dict(name="fp16", initial_scale=16.0)
    with Engine(net(), parallel, loss_fn=loss_of, **settings) as engine:
        norms = [m for m in engine.model.modules() if isinstance(m, nn.BatchNorm2d)]
        assert {norm.weight.dtype for norm in norms} == {torch.float32}
        losses = [engine.train_step(engine.shard_batch(batch)) for batch in batches()]
        same(engine, losses, DTYPES[precision], halves)


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", DTYPES)
def test_batch_norm_in_16_bits(precision: str) -> None:
    train(precision, {}, 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("spec", ["data", "zero 1", "zero 3"])
@ranks(2)
def test_batch_norm_in_16_bits_under_a_spec(spec: str, precision: str) -> None:
    train(precision, SPECS[spec][1], 2)


PLUGINS: dict[str, Any] = {
    "booster": lambda: (Booster("cpu", "bf16", TorchDDPPlugin()), "bf16"),
    "low-level": lambda: (
        Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp16", initial_scale=16)),
        "fp16",
    ),
    "gemini": lambda: (Booster(plugin=GeminiPlugin(precision="fp16", initial_scale=16)), "fp16"),
}


@pytest.mark.parametrize("name", PLUGINS)
@ranks(2)
def test_the_loop_of_a_resnet_script(name: str) -> None:
    booster, precision = PLUGINS[name]()
    model: Any = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    model.train()
    losses = []
    for batch in batches():
        images, labels = model.engine.shard_batch(batch)
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        share = all_reduce(loss.detach().float(), model.engine.mesh.group("data"))
        losses.append(float(share) / 2)
    same(model.engine, losses, DTYPES[precision], 2)
    model.eval()
    assert model(images).isfinite().all()


def test_regimes_that_keep_no_float32_are_refused() -> None:
    with pytest.raises(SpecError, match=r"regime='B' with InstanceNorm2d, which stays in float32 .* regime='A'"):
        Engine(
            net(),
            dict(zero=dict(stage=1, regime="B")),
            optimizer=dict(name="adamw", lr=LR),
            precision="bf16",
            loss_fn=loss_of,
        )
