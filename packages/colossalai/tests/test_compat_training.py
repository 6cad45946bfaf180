"""A script for Colossal-AI, its imports changed, trains as the plain loop of one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshfold.colossalai import LazyInitContext, TensorShardStrategy, ZeroInitContext
from meshfold.engine import Engine, initialize
from meshfold.mesh import SpecError, all_reduce
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig

ROWS, STEPS, CLIP = 8, 6, 0.3


class Net(nn.Module):
    """Two blocks between two layers, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    size = ROWS * STEPS
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(5, (size,), generator=generator))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as scripts make them: biases and norms do not decay and have a rate of their own."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-2},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.8, 0.9), eps=1e-6)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=1e-1, momentum=0.9, nesterov=True)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """One that is made of two others."""
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

    return SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 4)], milestones=[2]
    )


def serial(make: Callable[[nn.Module], Any], accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of the plain loop."""
    model, losses = net(), []
    optimizer = make(model)
    schedule = warm_up(optimizer)
    for number, (x, y) in enumerate(DataLoader(dataset(), batch_size=ROWS)):
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if number % accumulation == accumulation - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return losses, model.state_dict()


def script(config: dict[str, Any], make: Callable[[nn.Module], Any], accumulation: int) -> None:
    """The loop as Colossal-AI's users wrote it, compared with the plain one."""
    wanted, weights = serial(make, accumulation)
    model = net()
    optimizer = make(model)
    schedule = warm_up(optimizer)
    rules = {"last": "head"}  # neither its name nor its shape tells
    settings = dict(precision="fp64", clip_grad_norm=CLIP, gradient_accumulation=accumulation, rules=rules)
    engine, train, test, schedule = initialize(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        DataLoader(dataset(), batch_size=ROWS),
        None,
        schedule,
        config={**config, **settings},
    )
    assert test is None
    data = engine.mesh.group("data")
    engine.train()
    losses = []
    for number, (x, y) in enumerate(train):
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        stepped = engine.step()
        assert stepped == (number % accumulation == accumulation - 1)
        if stepped:
            schedule.step()
        losses.append(float(all_reduce(loss.detach(), data)) / data.size)
    assert losses == pytest.approx(wanted, rel=1e-9)
    found = engine.full_state_dict()
    assert list(found) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
    assert engine.steps == STEPS // accumulation
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]  # type: ignore[union-attr]
    engine.close()


CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tensor": (4, dict(parallel=dict(tensor=dict(size=2, mode="1d")))),
    "2.5d": (4, dict(parallel=dict(tensor=dict(mode="2.5d", depth=1, size=4)))),
    "zero": (2, dict(zero=dict(stage=2, placement="cpu"))),
    "model_config": (
        2,
        dict(zero=dict(model_config=dict(shard_strategy=TensorShardStrategy(), tensor_placement_policy="auto"))),
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_loop_of_initialize(name: str) -> None:
    size, config = CONFIGS[name]
    run_on_ranks(size, several_scripts, config)


def several_scripts(config: dict[str, Any]) -> None:
    script(config, adamw, accumulation=2)
    script(config, sgd, accumulation=1)


@ranks(2)
def test_a_pipeline_through_execute_schedule() -> None:
    wanted, weights = serial(adamw, 2)
    model = net()
    optimizer = adamw(model)
    schedule = warm_up(optimizer)
    config = dict(
        parallel=dict(pipeline=dict(size=2)),
        NUM_MICRO_BATCHES=4,
        gradient_accumulation=2,
        clip_grad_norm=CLIP,
        precision="fp64",
        example=(torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
    )
    engine, train, test, schedule = initialize(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        DataLoader(dataset(), batch_size=ROWS),
        DataLoader(dataset(), batch_size=ROWS),
        schedule,
        config=config,
    )
    assert engine.uses_pipeline
    assert engine.spec.pipeline is not None
    assert engine.spec.pipeline.microbatches == 4
    batches, losses = iter(train), []
    for _ in range(STEPS):
        engine.zero_grad()
        output, label, loss = engine.execute_schedule(batches)
        assert output is None
        assert label is None
        if engine.step():
            schedule.step()
        losses.append(float(loss))
    assert losses == pytest.approx(wanted, rel=1e-9)
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-11)
    evaluated = engine.execute_schedule(iter(test), forward_only=True)[2]
    plain = Net().double()
    plain.load_state_dict(weights)
    x, y = next(iter(DataLoader(dataset(), batch_size=ROWS)))
    assert float(evaluated) == pytest.approx(nn.functional.cross_entropy(plain(x), y).item(), rel=1e-9)
    assert engine.steps == STEPS // 2  # evaluation does not step
    with pytest.raises(SpecError, match=r"engine\(\.\.\.\) under pipeline"):
        engine(x)
    engine.close()


def test_without_a_pipeline_execute_schedule_gives_output_and_label() -> None:
    model = net()
    engine, train, _, _ = initialize(
        model,
        sgd(model),
        nn.CrossEntropyLoss(),
        DataLoader(dataset(), batch_size=ROWS),
        config=dict(precision="fp64"),
    )
    x, y = next(iter(train))
    wanted = net()(x)
    output, label, loss = engine.execute_schedule(iter([(x, y)]))
    torch.testing.assert_close(output, wanted)
    assert label is y
    assert float(loss) == pytest.approx(nn.functional.cross_entropy(wanted, y).item(), rel=1e-12)
    assert engine.step()
    assert engine.execute_schedule(iter([(x, y)]), forward_only=True, return_loss=False)[2] is None
    with pytest.raises(Exception, match=r"without a backward"):
        engine.step()


def test_evaluation_drops_nothing_and_keeps_no_graph() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 5))
    engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    x = torch.randn(4, 6)
    engine.eval()
    first = engine(x)
    assert not first.requires_grad
    torch.testing.assert_close(first, engine(x))
    engine.train()
    assert not torch.equal(engine(x).detach(), first)
    with torch.no_grad():  # as inside a script's own torch.no_grad()
        torch.testing.assert_close(engine(x), first)


@ranks(2)
def test_train_step_steps_by_itself_and_checkpoints_keep_the_schedule(tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        model = net()
        optimizer = adamw(model)
        engine, train, _, schedule = initialize(
            model,
            optimizer,
            nn.CrossEntropyLoss(),
            DataLoader(dataset(), batch_size=ROWS, shuffle=True),
            None,
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            config=dict(precision="fp64", gradient_accumulation=2),
        )
        return engine, train, schedule

    engine, train, schedule = start()
    losses = []
    for number, batch in enumerate(train):
        losses.append(engine.train_step(batch))
        if engine.last.stepped:
            schedule.step()
        if number == 1:
            engine.save(tmp_path / "checkpoint")
    again, rest, schedule = start()
    again.load(tmp_path / "checkpoint")
    assert schedule.last_epoch == 1
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-2)
    for number, batch in enumerate(rest, start=2):  # shuffled as before, from the place where it was
        assert again.train_step(batch) == pytest.approx(losses[number], rel=1e-10)
        if again.last.stepped:
            schedule.step()
    assert number == STEPS - 1


@pytest.mark.parametrize("context", [LazyInitContext, ZeroInitContext])
def test_a_model_that_is_never_whole(context: type[LazyInitContext]) -> None:
    run_on_ranks(2, lazily, context.__name__)


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=32, layers=2, heads=4, max_positions=16))


def lazily(name: str) -> None:
    with {"LazyInitContext": LazyInitContext, "ZeroInitContext": ZeroInitContext}[name]():
        model = gpt()
    assert all(p.is_meta for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    engine, *_ = initialize(model, optimizer, config=dict(parallel=dict(tensor=2), precision="fp64"))
    plain = Engine(gpt, dict(tensor=2), optimizer=dict(name="adamw", lr=1e-2, eps=1e-4), precision="fp64")
    ids = torch.randint(37, (4, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        loss = engine(ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        assert float(loss) == pytest.approx(plain.train_step(ids), rel=1e-9)
    assert engine.full_state_dict().keys() == plain.full_state_dict().keys()
