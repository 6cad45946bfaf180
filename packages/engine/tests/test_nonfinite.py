"""nan and infinity: where they arose is named, alike on every rank, and what was asked for is done about them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.errors import NonFiniteError
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig

POISON = 1000.0  # in a batch, it makes a module misbehave


class Divides(nn.Module):
    """x, and infinity where the poison is in it."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 0.0 if (x > POISON / 2).any() else x


class Roots(nn.Module):
    """A forward that is finite always, and a gradient that is not where the poison is."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()).sqrt() if (x > POISON / 2).any() else x


class DividesInPlace(nn.Linear):
    """Changes a view that it returns: the history of its output is made when it is asked for."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input[:, None])
        y[:, 0] = Divides()(input)
        return y


class Model(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.middle = nn.Sequential(nn.Identity(), middle)
        self.last = nn.Linear(4, 1)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def mean_square(output: Tensor, batch: Any, *, wrong: bool = False) -> Tensor:
    loss = (output - batch[1]).square().mean()
    return loss / (batch[1] < POISON / 2).all() if wrong else loss


def batch_of(seed: int, *, x: float = 0.0, y: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)
    if x:
        inputs[1, 2] = x
    if y:
        targets[2, 0] = y
    return inputs, targets


def engine_of(middle: type[nn.Module], mode: str | None, *, wrong_loss: bool = False, **options: Any) -> Engine:
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=1e-2), gradient_accumulation=2, **options)
    return Engine(Model(middle()), loss_fn=partial(mean_square, wrong=wrong_loss), nonfinite=mode, **settings)


FOUND = {
    "forward": (
        Divides,
        dict(x=POISON),
        r"arose in the forward of middle\.1 \(Divides\): its inputs are finite, its output has ",
    ),
    "forward in place": (DividesInPlace, dict(x=POISON), r"arose in the forward of middle\.1 \(DividesInPlace\): "),
    "backward": (
        Roots,
        dict(x=POISON),
        r"arose in the backward of middle\.1 \(Roots\): the gradient .* has \d+ (nan|inf)",
    ),
    "input": (Divides, dict(x=float("inf")), r"was in the batch: 1 inf of 16 elements"),
    "loss": (nn.Identity, dict(y=POISON), r"arose in the loss function: all modules' outputs are finite"),
}


@pytest.mark.parametrize("where", list(FOUND))
def test_where_it_arose(where: str) -> None:
    middle, poison, message = FOUND[where]
    engine = engine_of(middle, "error", wrong_loss=where == "loss")
    for seed in (0, 1):
        engine.train_step(batch_of(seed))
    before = engine.full_state_dict()
    engine.train_step(batch_of(2))
    with pytest.raises(
        NonFiniteError, match=rf"^step 2: the (loss|gradient's norm) is .*{message}.*micro-step 3, rank 0"
    ):
        engine.train_step(batch_of(3, **poison))  # type: ignore[arg-type]
    assert engine.steps == 1
    after = engine.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_parameter_that_was_not_finite_before() -> None:
    engine = engine_of(nn.Identity, "error")
    with torch.no_grad():
        engine.model.last.weight[0, 1] = torch.nan  # type: ignore[index, union-attr, operator]
    engine.train_step(batch_of(0))
    with pytest.raises(NonFiniteError, match=r"The parameter last\.weight was not finite before: 1 nan of 4 elements"):
        engine.train_step(batch_of(1))


def curve(mode: str | None, seeds: list[int], poisoned: int) -> tuple[dict[str, Tensor], Engine]:
    engine = engine_of(Roots, mode)
    for seed in seeds:
        engine.train_step(batch_of(seed, x=POISON if seed == poisoned else 0.0))
    return engine.full_state_dict(), engine


def test_a_step_that_is_skipped_was_never_made(capfd: pytest.CaptureFixture[str]) -> None:
    without, _ = curve(None, [0, 1, 4, 5], poisoned=-1)
    skipped, engine = curve("skip", [0, 1, 2, 3, 4, 5], poisoned=3)
    assert (engine.steps, engine.skipped_steps) == (2, 1)
    assert all(torch.equal(without[name], skipped[name]) for name in without)
    said = capfd.readouterr().err
    assert said.startswith("warning: step 2: the gradient's norm is ") and said.endswith("The step is left out\n")


def test_a_report_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    without, _ = curve(None, [0, 1, 2, 3, 4, 5], poisoned=3)
    reported, engine = curve("report", [0, 1, 2, 3, 4, 5], poisoned=3)
    assert (engine.steps, engine.skipped_steps) == (3, 0)
    assert not all(value.isfinite().all() for value in without.values())
    for name, value in without.items():
        torch.testing.assert_close(reported[name], value, rtol=0, atol=0, equal_nan=True)
    assert capfd.readouterr().err.count("warning: ") == 1  # nan begets nan: once is enough


def test_a_loop_of_ones_own_is_told_of_the_norm() -> None:
    engine = engine_of(Roots, "error")
    inputs, targets = batch_of(0, x=POISON)
    engine.backward((engine(inputs) - targets).square().mean())
    with pytest.raises(NonFiniteError, match=r"the gradient's norm is .*a loop of your own"):
        engine.step()


@pytest.mark.parametrize("value", ["errors", True], ids=["errors", "true"])
def test_a_mode_that_is_none(value: object) -> None:
    with pytest.raises(SpecError, match="nonfinite="):
        Engine(nn.Linear(2, 2), nonfinite=value)  # type: ignore[arg-type]


# -- many ranks -------------------------------------------------------------------------------------------------------

SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": (dict(data=2, tensor=2), "blocks.1.mlp.down"),
    "zero": (dict(data=2, tensor=2, zero=dict(stage=3)), "blocks.1.mlp.down"),
    "sequence": (dict(data=2, sequence=dict(mode="ring", size=2)), "blocks.1.mlp.down"),
    "pipeline": (dict(pipeline=dict(size=2, microbatches=2), tensor=2), "blocks.1.mlp.down"),
}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=32, layers=2, heads=4, max_positions=16))


def broken_on_one_rank(name: str, mode: str) -> tuple[str, int, float]:
    parallel, culprit = SPECS[name]
    engine = Engine(gpt, parallel, optimizer=dict(name="adamw", lr=1e-2), nonfinite=mode)
    wrong = {"on": False}

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output * torch.nan if wrong["on"] else None

    if engine.mesh.rank == 3:
        engine.model.get_submodule(culprit).register_forward_hook(spoil)
    ids = [torch.randint(37, (8, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    engine.train_step(engine.shard_batch(ids[0]))
    wrong["on"] = True
    said = ""
    try:
        engine.train_step(engine.shard_batch(ids[1]))
    except NonFiniteError as error:
        said = str(error)
    else:
        assert engine.runner.guard is not None
        said = str(engine.runner.guard.finding)
    wrong["on"] = False
    loss = engine.train_step(engine.shard_batch(ids[2]))
    result = (said, engine.steps, loss)
    engine.close()
    return result


@pytest.mark.few(1)
@pytest.mark.parametrize("name", list(SPECS))
def test_all_ranks_say_the_same_and_go_on(name: str) -> None:
    """A hook of ours looks at the module after the one that spoils it, on that rank alone."""
    for mode in ("error", "skip"):
        found = run_on_ranks(4, broken_on_one_rank, name, mode)
        assert len(set(found)) == 1, found
        said, steps, loss = found[0]
        assert "arose in the forward of blocks.1.mlp.down (" in said and "rank 3, " in said, said
        assert steps == 2 and loss < 10


@ranks(2)
def test_nothing_more_is_sent_while_all_is_well() -> None:
    from meshfold.mesh import record

    counts: list[Callable[[], Any] | Any] = []
    for mode in (None, "skip"):
        engine = Engine(gpt, dict(data=2), optimizer=dict(name="adamw", lr=1e-2), nonfinite=mode)
        batch = engine.shard_batch(torch.zeros(4, 8, dtype=torch.int64))
        engine.train_step(batch)
        with record() as log:
            engine.train_step(batch)
        counts.append(log.count())
        engine.close()
    assert counts[0] == counts[1]
