"""What a newcomer gets wrong with a model of one's own: a sentence says what to change, before a step is made."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from meshfold.engine import CheckpointError, Engine, TrainingError
from meshfold.engine.batches.shown import called, shown
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig

INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(6) % 3
BATCH = INPUTS, TARGETS
PLACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero 1": dict(zero=dict(stage=1)),
    "zero 3": dict(zero=dict(stage=3)),
}


class Net(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return y


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def engine_of(model: Any = Net, parallel: Any = None, **settings: Any) -> Engine:
    return Engine(model, parallel or {}, **{"optimizer": dict(name="adamw", lr=0.05), "loss_fn": loss, **settings})


def step(engine: Engine) -> Callable[[torch.optim.Optimizer], Any]:
    """Makes a scheduler of another engine's optimizer."""
    return lambda optimizer: torch.optim.lr_scheduler.ConstantLR(engine.optimizer)  # type: ignore[arg-type]


# -- settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(loss_fn=lambda output: output.sum()),
            r"loss_fn takes \(output\): it is called with the model's output",
        ),
        (dict(loss_fn=nn.CrossEntropyLoss), "loss_fn=CrossEntropyLoss is a class: make an instance, and write"),
        (dict(loss_fn="mse"), "loss_fn='mse': give a function of"),
        (
            dict(optimizer=dict(name="adamw", lr="1e-3")),
            "lr='1e-3' is not a number; leave it out for the default, 0.001",
        ),
        (dict(optimizer=dict(name="adamw", lr=None)), "lr=None is not a number"),
        (dict(optimizer=dict(name="sgd", momentum=True)), "momentum=True is not a number"),
        (
            dict(optimizer=dict(name="adamw", lr=1e-3, betas=0.9)),
            r"betas=0.9: give 2 values, as in betas=\(0.9, 0.999\)",
        ),
        (
            dict(optimizer=lambda own: torch.optim.SGD(Net().parameters(), lr=0.1)),
            "other parameters than it is given",
        ),
        (
            dict(lr_scheduler=torch.optim.lr_scheduler.StepLR),
            "missing 1 required positional argument: 'step_size'",
        ),
        (dict(lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau), "stepped with a validation loss"),
        (dict(lr_scheduler="cosine"), "lr_scheduler='cosine': give a function of the optimizer"),
        (dict(device="gpu"), "device='gpu' is not a device of torch: write 'cpu', 'cuda'"),
        (dict(device="cuda:99"), "device='cuda:99': torch sees (no|[0-9]+) GPUs"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:24],
)
def test_a_wrong_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        engine_of(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(optimiser=dict(name="sgd")),
            r"Engine\(optimiser=dict\(name='sgd'\)\): there is no argument 'optimiser'\. Did you mean 'optimizer'\? Known: model, ",
        ),
        (dict(loss=F.mse_loss), r"Engine\(loss=<function .*no argument 'loss'\. Did you mean 'loss_fn'\?"),
        (
            dict(fsdp=True),
            r"Engine\(fsdp=True\): there is no argument 'fsdp'\. Known: model, parallel, optimizer, ",
        ),
    ],
)
def test_a_name_that_is_no_argument(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Engine(Net, **settings)
    assert "optimizer" in inspect.signature(Engine).parameters  # what editors and typing see


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ("rows", "a batch of type str"),
        (
            dict(features=INPUTS),
            r"example: Net takes \(x.*\).*, but would be called with \(features=6×4 float32\)",
        ),
        (((INPUTS, INPUTS), TARGETS), r"example: Net takes .* called with \(6×4 float32, 6×4 float32\)"),
    ],
    ids=["no batch", "another name", "one too many"],
)
@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_example_shows_without_a_pipeline_too(example: Any, message: str, place: str) -> None:
    with pytest.raises(SpecError, match=message):
        engine_of(parallel=PLACES[place], example=example)
    engine_of(parallel=PLACES[place], example=BATCH).close()


def test_a_scheduler_of_another_optimizer() -> None:
    with pytest.raises(SpecError, match="made a ConstantLR of another optimizer"):
        engine_of(lr_scheduler=step(engine_of()))


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda hidden: Net(hidden), r"is called without arguments, but takes \(hidden\): write lambda"),
        (nn.DataParallel(Net()), "the model is already a DataParallel"),
        (nn.Tanh, "no parameter of Tanh is to be trained: there are none"),
        (frozen, r"all are frozen \(requires_grad=False\)"),
        ("gpt-tiny", "model='gpt-tiny': give an nn.Module, or a function"),
    ],
    ids=["wants arguments", "wrapped", "none to train", "frozen", "a name"],
)
@pytest.mark.parametrize("place", ["plain", "zero 3"])
def test_a_wrong_model(model: Any, message: str, place: str) -> None:
    with pytest.raises(SpecError, match=message):
        engine_of(model, PLACES[place])


def test_who_only_evaluates_may_have_nothing_to_train() -> None:
    assert engine_of(frozen, optimizer=None).eval_step(BATCH) > 0


# -- one module, two engines ----------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("place", PLACES)
def test_a_module_is_trained_by_one_engine_at_a_time(place: str) -> None:
    model = Net()
    first = engine_of(model, PLACES[place])
    before = first.train_step(BATCH)
    with pytest.raises(SpecError, match=r"Net\(\.\.\.\): another engine already trains it"):
        engine_of(model)
    with pytest.raises(SpecError, match=r"another engine already trains its '0\.up'"):
        engine_of(nn.Sequential(model, nn.Linear(3, 3)))
    first.close()
    with engine_of(model, PLACES[place]) as second:
        losses = [second.train_step(BATCH) for _ in range(3)]
    assert before > losses[0] > losses[1] > losses[2]


@pytest.mark.few(2)
@pytest.mark.parametrize("place", PLACES)
def test_an_engine_that_is_closed_trains_no_more(place: str) -> None:
    engine = engine_of(Net(), PLACES[place])
    engine.train_step(BATCH)
    engine.close()
    with pytest.raises(TrainingError, match=r"this engine is closed.* make another Engine"):
        engine.train_step(BATCH)


def test_an_engine_that_is_gone_leaves_the_gradients() -> None:
    model = Net()
    engine_of(model).train_step(BATCH)  # nobody has it, nobody closed it
    losses = [loss_ for engine in [engine_of(model)] for loss_ in (engine.train_step(BATCH) for _ in range(3))]
    assert losses[0] > losses[1] > losses[2]


def test_an_engine_that_failed_to_stand_takes_nothing() -> None:
    model = Net()
    with pytest.raises(SpecError, match="lr_scheduler") as kept:  # and with it what the frames of the error hold
        engine_of(model, dict(zero=dict(stage=3)), lr_scheduler=7)
    with pytest.raises(SpecError, match="lr_scheduler") as also_kept:
        engine_of(model, lr_scheduler=lambda optimizer: None)
    losses = [engine.train_step(BATCH) for engine in [engine_of(model)] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2] and kept.value is not also_kept.value


@pytest.mark.parametrize("evaluates_first", [True, False])
def test_one_engine_may_evaluate_what_another_trains(evaluates_first: bool) -> None:
    model, made = Net(), {}
    for trains in (not evaluates_first, evaluates_first):
        made[trains] = engine_of(model, **({} if trains else {"optimizer": None}))
    losses = [made[True].train_step(BATCH) for _ in range(2)]
    assert losses[0] > losses[1] > made[False].eval_step(BATCH)


# -- losses and batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda output, batch: loss(output, batch).item(),
            r"loss_fn returned [0-9.]+: return a tensor of one number",
        ),
        (lambda output, batch: None, "loss_fn returned None"),
        (
            lambda output, batch: F.cross_entropy(output, batch[1], reduction="none"),
            "loss_fn returned 6 float32",
        ),
        (
            lambda output, batch: loss(output.detach(), batch),
            "the loss depends on no trained parameter",
        ),
        (nn.CrossEntropyLoss(), r"criterion\(output, batch\[1\]\)"),
        (F.cross_entropy, "loss_fn=cross_entropy needs the targets"),
    ],
    ids=["a float", "nothing", "a row each", "detached", "a criterion", "a function of torch"],
)
@pytest.mark.parametrize("place", ["plain", "zero 3"])
def test_a_loss_that_is_none(loss_fn: Any, message: str, place: str) -> None:
    engine = engine_of(parallel=PLACES[place], loss_fn=loss_fn)
    with pytest.raises(SpecError, match=message):
        engine.train_step(BATCH)
    assert engine.steps == 0


def test_a_criterion_of_output_and_batch_is_a_loss() -> None:
    engine = Engine(lambda: nn.Linear(4, 4), optimizer="sgd", loss_fn=nn.MSELoss())
    assert math.isfinite(engine.train_step(INPUTS))


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ((INPUTS[:0], TARGETS[:0]), SpecError, r"a batch of 0 rows, of shape \(0, 4\)"),
        ((INPUTS.numpy(), TARGETS.numpy()), SpecError, "torch.as_tensor"),
        ((INPUTS[:, :3], TARGETS), RuntimeError, "the model was called with (6×3 float32)"),
        ((INPUTS.long(), TARGETS), RuntimeError, "the model was called with (6×4 int64)"),
        (dict(inputs=INPUTS), SpecError, "called with 'inputs', but Net takes x: leave it out"),
        ((INPUTS, TARGETS + 9), IndexError, "output = 6×3 float32, batch = (6×4 float32, 6 int64)"),
    ],
    ids=["no rows", "arrays", "too narrow", "integers", "a name", "labels"],
)
@pytest.mark.parametrize("place", PLACES)
def test_after_a_wrong_batch_training_goes_on(batch: Any, error: type[Exception], words: str, place: str) -> None:
    engine = engine_of(parallel=PLACES[place])
    before = engine.train_step(BATCH)
    with pytest.raises(error, match=words if error is SpecError else None) as raised:
        engine.train_step(batch)
    if error is not SpecError:
        assert any(words in note for note in raised.value.__notes__)
    assert engine.train_step(BATCH) < before and engine.steps == 2


def test_values_are_shown_in_a_few_words() -> None:
    assert shown([torch.tensor(1.0), None, "x" * 99]) == f"[scalar float32, None, '{'x' * 59}...]"
    assert shown(tuple(range(10))) == "(0, 1, 2, 3, 4, 5, 6, 7, 2 more)"
    assert called((INPUTS,), {"mask": Net()}) == "(6×4 float32, mask=a Net)"


def test_what_cannot_be_cut_or_served() -> None:
    engine, data = engine_of(), TensorDataset(INPUTS, TARGETS)
    with pytest.raises(SpecError, match="a batch without dims"):
        engine.shard_batch(torch.tensor(1.0))
    for settings, message in (
        (dict(workers=2), "no key 'workers'. Did you mean 'num_workers'"),
        (dict(num_workers=-1), "num_workers"),
        (dict(shuffle="no"), r"shuffle='no'\): True or False"),
        (dict(drop_last=1), r"drop_last=1\): True or False"),
    ):
        with pytest.raises(SpecError, match=message):
            engine.dataloader(data, batch_size=2, **settings)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="a dataset of 0 examples"):
        engine.dataloader([], batch_size=2)


# -- checkpoints ------------------------------------------------------------------------------------------------------------


def test_what_is_no_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    engine = engine_of()
    torch.save(engine.model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    for path, message in (
        (
            tmp_path / "weights.pt",
            r"it is a file, and a checkpoint is a folder; .*load_state_dict\(torch.load",
        ),
        (tmp_path / "llama", r"it is a Hugging Face folder: Engine\(pretrained\(folder\)"),
        (tmp_path / "gone", "it does not exist"),
        (None, r"load\(None\): give the path of a folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            engine.load(path)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"save\(7\): give the path of a folder"):
        engine.save(7)  # type: ignore[arg-type]
    engine.load_state_dict(torch.load(tmp_path / "weights.pt"))  # as it says


def test_a_checkpoint_without_an_optimizer_is_not_gone_on_from(tmp_path: Path) -> None:
    engine_of(optimizer=None).save(tmp_path / "model")
    engine = engine_of()
    with pytest.raises(CheckpointError, match=r"no optimizer state, but this engine has AdamW: .*weights_only=True"):
        engine.load(tmp_path / "model")
    engine.load(tmp_path / "model", weights_only=True)


def test_a_schedule_on_one_side_alone_is_said(tmp_path: Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    engine_of().save(tmp_path / "without")
    engine_of(lr_scheduler=schedule).save(tmp_path / "with")
    with pytest.warns(UserWarning, match="no state of an lr_scheduler: that of this engine begins at its first step"):
        engine_of(lr_scheduler=schedule).load(tmp_path / "without")
    with pytest.warns(UserWarning, match="and this engine has none: the learning rate stays"):
        engine_of().load(tmp_path / "with")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_of(lr_scheduler=schedule).load(tmp_path / "with")
        engine_of().load(tmp_path / "without")
        engine_of().load(tmp_path / "with", weights_only=True)


# -- several ranks ------------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.blocks = nn.Linear(4, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.blocks(self.up(x)))
        return y


@ranks(2)
def test_blocks_that_nothing_comes_before() -> None:
    with pytest.raises(SpecError, match="no layer runs before block 0"):
        engine_of(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), dict(pipeline=2), example=BATCH)


@ranks(2)
def test_features_have_no_tokens_to_split() -> None:
    engine = engine_of(parallel=dict(sequence=dict(mode="ring", size=2)))
    with pytest.raises(SpecError, match=r"without a tensor of ids \[batch, tokens\] or features"):
        engine.train_step(BATCH)


def test_an_engine_without_an_optimizer_says_so() -> None:
    with pytest.raises(TrainingError, match="no optimizer"):
        engine_of(optimizer=None).train_step(BATCH)


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.embed(input_ids)
        return out


def test_what_a_model_does_not_take_is_told_before_it_is_called() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    optimizer = dict(name="adamw", lr=1e-3)
    config = GPTConfig(vocab_size=32, hidden=16, layers=1, heads=2, max_positions=8)
    with Engine(lambda: GPT(config), {}, optimizer=optimizer) as engine:
        for name, said in (
            (
                "attention_mask",
                "GPT takes input_ids, labels, position_ids: leave it out. Rows .* labels with -100",
            ),
            ("weights", "called with 'weights', but GPT takes input_ids, labels, position_ids: leave it out"),
            ("label", "called with 'label', but GPT takes .*: leave it out. Did you mean 'labels'"),
        ):
            with pytest.raises(SpecError, match=said):
                engine.train_step({"input_ids": ids, name: torch.ones_like(ids)})
    with (
        Engine(Headless, {}, optimizer=optimizer) as engine,
        pytest.raises(SpecError, match="give Engine a loss_fn"),
    ):
        engine.train_step({"input_ids": ids})
    beside = Engine(Headless, {}, optimizer=optimizer, loss_fn=lambda output, batch: output.sum())
    with beside as engine, pytest.raises(SpecError, match=r"'labels'.* give a pair \(inputs, targets\)"):
        engine.train_step({"input_ids": ids, "labels": ids})


def test_ids_of_32_bits_are_labels_too() -> None:
    """Token files often hold 32 bits; cross entropy takes labels of 64 only."""
    ids = torch.arange(8).view(2, 4)
    with Engine(lambda: GPT(GPTConfig(vocab_size=32, hidden=16, layers=1, heads=2, max_positions=8)), {}) as engine:
        assert engine.eval_step(ids.int()) == engine.eval_step(ids)
