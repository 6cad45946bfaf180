"""Models that are not as tidy as a GPT train under any spec as in a plain PyTorch loop: losses, norms, every tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine, TrainingError
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks

VOCABULARY, HIDDEN, RATE = 13, 8, 0.5
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau
Batch = Any
Hook = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Counting(Block):
    """Changes buffers in its forward, by hand and by a norm; what it returns depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(HIDDEN)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.average.mul_(0.5).add_(x.flatten(0, 1).mean(0), alpha=0.5)
        return super().forward(self.batch_norm(x.flatten(0, 1)).view_as(x) * (1 + self.average))


class Model(nn.Module):
    def __init__(self, block: type[Block] = Block, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def masked_mean(output: Tensor, targets: Tensor) -> Tensor:
    """As many write it: 0/0 where nothing counts."""
    counts = targets != -100
    each = F.cross_entropy(output.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
    return (each.view(targets.shape) * counts).sum() / counts.sum()


def of_a_pair(output: Tensor, batch: Batch) -> Tensor:
    return masked_mean(output, batch[1])


def of_a_dict(output: Tensor, batch: Batch) -> Tensor:
    return masked_mean(output, batch["targets"])


def pairs() -> list[Batch]:
    """Different numbers of targets in each row; none at all in the first five of eight."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        ids = torch.randint(VOCABULARY, (8, 6), generator=generator)
        targets = ids.flip(1).masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -100)
        targets[:5], targets[5:, 0] = -100, 1
        found.append((ids, targets))
    return found


def train(
    make: Callable[[], nn.Module] | nn.Module,
    parallel: Mapping[str, Any],
    loss_fn: Callable[[Any, Any], Tensor] = of_a_pair,
    batches: list[Batch] | None = None,
    plain: Callable[[], nn.Module] | None = None,
    own_loss: bool = False,
    by_name: bool = False,
    **settings: Any,
) -> None:
    """Three steps of an engine, and of a plain loop from the same weights with whole batches."""
    optimizer = dict(name="sgd", lr=RATE, weight_decay=0.1, no_decay="norms_and_biases")
    batches = pairs() if batches is None else batches
    told_loss: dict[str, Any] = {} if own_loss else dict(loss_fn=loss_fn)
    with Engine(make, parallel, optimizer=optimizer, precision="fp64", **told_loss, **settings) as engine:
        first = engine.full_state_dict()
        seen = []
        for batch in batches:
            loss = engine.train_step(engine.shard_batch(batch))
            assert engine.last is not None
            assert engine.last.grad_norm is not None
            seen.append([loss, engine.last.grad_norm])
        found = engine.full_state_dict()
    build = plain or (make if not isinstance(make, nn.Module) else None)
    assert build is not None
    model = build().double()
    model.load_state_dict(first)
    for batch, told in zip(batches, seen, strict=True):
        ids = batch[0] if isinstance(batch, tuple) else batch["input_ids"]
        loss_there = loss_fn(model(**batch) if by_name else model(ids), batch)
        loss_there.backward()
        trained = [p for p in model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in trained if p.grad is not None]).sum().sqrt()
        torch.testing.assert_close(
            torch.tensor(told, dtype=torch.float64), torch.stack([loss_there, norm]).detach(), rtol=1e-9, atol=1e-9
        )
        with torch.no_grad():
            for p in trained:
                assert p.grad is not None
                p -= RATE * (p.grad + (0.1 * p if p.dim() > 1 else 0.0))
                p.grad = None
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=f"{name} differs")


# -- batches ----------------------------------------------------------------------------------------------------------


SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=4),
    "data × tensor": dict(data=2, tensor=2),
    "data × pipeline": dict(data=2, pipeline=dict(size=2, schedule="zb-h1", microbatches=4)),
    "zero 3": dict(data=4, zero=dict(stage=3)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_nothing_counts_on_some_ranks_and_in_some_microbatches(name: str) -> None:
    """Neither the mean over nothing nor its gradient gets through; whoever counts targets counts those of all."""
    train(Model, SPECS[name])
    batches = [dict(input_ids=ids, targets=targets) for ids, targets in pairs()]
    train(Model, SPECS[name], loss_fn=of_a_dict, batches=batches)


@ranks(4)
def test_a_coordinate_without_rows_counts_nothing_whatever_its_targets_are_called() -> None:
    batches = [dict(input_ids=ids[5:], targets=targets[5:]) for ids, targets in pairs()]
    train(Model, dict(data=4), loss_fn=of_a_dict, batches=batches)


class Tagging(Model):
    """Its own loss, which moves nothing, and says so."""

    loss_type = "ForTokenClassification"

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        output = super().forward(input_ids)
        return output if labels is None else {"loss": masked_mean(output, labels), "logits": output}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_labels_of_a_loss_that_moves_nothing_all_count(name: str) -> None:
    def loss_fn(output: Tensor, batch: Batch) -> Tensor:
        return masked_mean(output, batch["labels"])

    batches = [dict(input_ids=ids, labels=targets) for ids, targets in pairs()]
    train(Tagging, SPECS[name], loss_fn=loss_fn, batches=batches, own_loss=True)


class KeywordsOnly(Model):
    def forward(self, *, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


class AnyKeywords(Model):
    """Its own loss, and no argument of a place."""

    loss_type = "ForTokenClassification"

    def forward(self, **batch: Tensor) -> Any:  # type: ignore[override]
        output = super().forward(batch["input_ids"])
        return {"loss": masked_mean(output, batch["labels"])}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_a_forward_that_takes_its_ids_by_name(name: str) -> None:
    batches = [dict(input_ids=ids, targets=targets) for ids, targets in pairs()]
    more: dict[str, Any] = dict(example=batches[0]) if "pipeline" in SPECS[name] else {}
    train(KeywordsOnly, SPECS[name], loss_fn=of_a_dict, batches=batches, by_name=True, **more)
    with Engine(AnyKeywords, SPECS[name], optimizer="sgd", precision="fp64", **more) as engine:
        ids = torch.randint(VOCABULARY, (8, 6))
        losses = [engine.eval_step(engine.shard_batch(batch)) for batch in (ids, dict(input_ids=ids, labels=ids))]
        assert losses[0] == losses[1]
        engine.train_step(engine.shard_batch(ids))


# -- what is trained --------------------------------------------------------------------------------------------------


def frozen(trained: Callable[[str], bool]) -> nn.Module:
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    return model


def only_behind() -> nn.Module:
    return frozen(lambda name: name.startswith(("blocks.3", "head")))


def only_before() -> nn.Module:
    return frozen(lambda name: name.startswith(("embed", "blocks.0.up")))


def only_norms() -> nn.Module:
    return frozen(lambda name: "norm" in name)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [only_behind, only_before, only_norms])
@pytest.mark.parametrize("zero", [None, dict(stage=1), dict(stage=3)], ids=["plain", "zero 1", "zero 3"])
@ranks(4)
def test_stages_of_which_nothing_or_only_vectors_are_trained(
    make: Callable[[], nn.Module], zero: dict[str, Any] | None
) -> None:
    """Their optimizers have nothing, and the groups of the others: a checkpoint is asked for by every engine."""
    spec: dict[str, Any] = dict(data=2, pipeline=2)
    train(make, spec if zero is None else {**spec, "zero": zero})


FREEZING: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "tensor": dict(tensor=2),
    "pipeline": dict(pipeline=2),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 3": dict(data=2, zero=dict(stage=3)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FREEZING)
@ranks(2)
def test_what_an_engine_trains_may_be_frozen_for_some_steps(name: str) -> None:
    """From the first step on, and once more later: AdamW skips it, as in torch."""
    torch.manual_seed(0)
    serial = Model().double()
    with Engine(
        Model, FREEZING[name], optimizer=dict(name="adamw", lr=0.1), precision="fp64", loss_fn=of_a_pair
    ) as engine:
        steps = torch.optim.AdamW(serial.parameters(), lr=0.1)
        serial.load_state_dict(engine.full_state_dict())
        for step, batch in enumerate((*pairs(), pairs()[0])):
            for model in (engine.model, serial):
                for path, parameter in model.named_parameters():
                    if path.startswith("embed") or ".up" in path:
                        parameter.requires_grad_(step in (1, 3))
            steps.zero_grad()
            loss = of_a_pair(serial(batch[0]), batch)
            loss.backward()
            steps.step()
            assert engine.train_step(engine.shard_batch(batch)) == pytest.approx(float(loss.detach()), rel=1e-9)
        found = engine.full_state_dict()
    for path, value in serial.state_dict().items():
        torch.testing.assert_close(found[path], value, rtol=1e-9, atol=1e-9, msg=f"{path} differs")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FREEZING)
@ranks(2)
def test_what_was_frozen_when_the_engine_was_made_is_not_trained_silently(name: str) -> None:
    with Engine(only_norms, FREEZING[name], optimizer="sgd", precision="fp64", loss_fn=of_a_pair) as engine:
        engine.train_step(engine.shard_batch(pairs()[0]))
        engine.model.requires_grad_(True)
        with pytest.raises(TrainingError, match=r"is to be trained now .* was frozen when the engine was made"):
            engine.train_step(engine.shard_batch(pairs()[1]))
        if "pipeline" not in FREEZING[name]:
            with pytest.raises(TrainingError, match="was frozen when the engine was made"):
                engine(pairs()[1][0])


@ranks(2)
def test_what_cannot_be_trained_is_refused() -> None:
    def phased() -> nn.Module:
        model = Model()
        model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        return model

    def empty() -> nn.Module:
        model = Model()
        model.extra = nn.Parameter(torch.empty(0, 3))
        return model

    for make, parallel, settings, message in (
        (
            lambda: frozen(lambda name: False),
            dict(pipeline=2),
            {},
            "no parameter of Model is to be trained: all are frozen",
        ),
        (
            lambda: frozen(lambda name: False),
            {},
            {},
            "no parameter of Model is to be trained: all are frozen",
        ),
        (empty, dict(zero=dict(stage=1)), {}, r"parameter 'extra' of shape \(0, 3\) has no elements"),
        (phased, {}, {}, "parameter 'phase' is torch.complex64"),
        (Model, {}, dict(lr_scheduler=PLATEAU), "stepped with a validation loss"),
    ):
        with pytest.raises(SpecError, match=message):
            Engine(make, parallel, optimizer="sgd", loss_fn=of_a_pair, **settings)


class Lars(torch.optim.Optimizer):
    """The length of a step is that of the whole parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, dict(lr=0.1))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad * p.norm() / p.grad.norm()


class Together(Lars):
    """The length of a step is that of all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        all_of = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in all_of]).norm()
        for p in all_of:
            p -= 0.1 * p.grad / norm


class Said(Lars):
    elementwise = True


def by_place(parameters: Any) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}]
    return torch.optim.SGD(groups)


@ranks(2)
def test_optimizers_that_look_at_what_another_rank_has_are_refused() -> None:
    """A custom one is tried out where parameters are split, or stages have others; it is taken at its word."""
    of: dict[str, Any] = dict(precision="fp64", loss_fn=of_a_pair)
    for parallel, optimizer, message in (
        (dict(tensor=2), Lars, "Lars needs whole parameters, but a rank has only a part of 'embed.weight'"),
        (dict(tensor=2), Together, "Together's step on a parameter depends on other parameters"),
        (dict(pipeline=2), Together, "Together's step on a parameter depends on other parameters"),
        (dict(pipeline=2), by_place, "by their position in the list"),
        (dict(pipeline=2, zero=dict(stage=1)), by_place, "by their position in the list"),
    ):
        with pytest.raises(SpecError, match=message):
            Engine(Model, parallel, optimizer=optimizer, **of)
    right: list[tuple[dict[str, Any], Any]] = [
        (dict(data=2), Together),
        (dict(pipeline=2), Lars),
        (dict(tensor=2), Said),
        (dict(tensor=2), by_place),
    ]
    for parallel, optimizer in right:
        Engine(Model, parallel, optimizer=optimizer, **of).close()


# -- hooks ------------------------------------------------------------------------------------------------------------


def hooked() -> nn.Module:
    """Hooks on parameters, one of them tied to nothing else, and on modules, before and behind."""
    model = Model()
    model.embed.weight.register_hook(lambda gradient: gradient * 0.5)
    for block in model.blocks:
        block.up.weight.register_hook(lambda gradient: gradient * 0.25)
        block.down.bias.register_post_accumulate_grad_hook(_double)
        block.up.register_forward_hook(lambda module, given, output: output * 0.5)
        block.register_forward_pre_hook(lambda module, given: (given[0] * 1.1,))
        block.down.register_full_backward_hook(lambda module, inwards, outwards: (inwards[0] * 0.5,))
        block.up.register_full_backward_pre_hook(lambda module, outwards: (outwards[0] * 3.0,))
    return model


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2.0)


HOOKED: dict[str, dict[str, Any]] = {
    **SPECS,
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "pipeline × tensor": dict(pipeline=2, tensor=2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HOOKED)
@ranks(4)
def test_hooks_stay(name: str) -> None:
    """Those of a module that is split or made anew, and those of one that a function builds without allocating it."""
    torch.manual_seed(0)
    train(hooked, HOOKED[name])
    train(hooked(), HOOKED[name], plain=hooked)


# -- buffers ----------------------------------------------------------------------------------------------------------


def counting() -> nn.Module:
    return Model(Counting, blocks=8)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("schedule", "more", "settings"),
    [
        ("1f1b", {}, {}),
        ("auto", {}, {}),
        ("1f1b", dict(zero=dict(stage=3)), {}),
        ("zb-h1", {}, dict(recompute="blocks")),
    ],
    ids=["shapes are looked at", "stages are measured", "stages are rehearsed", "blocks are recomputed"],
)
@ranks(4)
def test_only_training_changes_buffers(schedule: str, more: dict[str, Any], settings: dict[str, Any]) -> None:
    """One micro-batch: statistics of a norm are those of the batch."""
    pipeline = dict(size=4, schedule=schedule, microbatches=1)
    train(counting, dict(pipeline=pipeline, **more), **settings)
