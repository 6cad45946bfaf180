"""What a trainer may ask of MeshfoldStrategy beside a plain fit: accumulation, clipping, precisions, optimizers, callbacks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning", reason="needs meshfold[lightning]")

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping
from torch.utils.data import DataLoader

from meshfold.engine import TrainingError
from meshfold.lightning import named_optimizer
from meshfold.mesh import SpecError, record
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.optimizers import ROLES, Came, Lamb

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from lightning_cases import (
    RULES,
    Boring,
    Characterwise,
    Notes,
    Rows,
    assert_same,
    parallel_run,
    serial,
    strategy_of,
    trainer_of,
)

TENSOR, ZERO = {"data": 2, "tensor": 2}, {"zero": {"stage": 3, "placement": "cuda"}}
SPECS = {"data 2 × tensor 2": TENSOR, "zero 3": ZERO}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Pair(LightningModule):
    """Two models with an optimizer each, of which the first trains against the second, as in a GAN."""

    def __init__(self, *, toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization, self.toggles = False, toggles
        self.maker, self.judge = Mlp(), Mlp()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(first)
        made = self.judge(self.maker(batch)).square().mean()
        self.manual_backward(made)
        self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(first)
        else:
            second.zero_grad()  # what the first loss has left there
        judged = (self.judge(self.maker(batch).detach()) - 1).square().mean() + self.judge(batch).square().mean()
        self.manual_backward(judged)
        self.clip_gradients(second, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        second.step()
        second.zero_grad()
        return made.detach() + judged.detach()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.maker.parameters(), lr=0.5),
            torch.optim.SGD(self.judge.parameters(), lr=0.5),
        ]


class Untoggled(Pair):
    def __init__(self) -> None:
        super().__init__(toggles=False)


class Thaw(BaseFinetuning):
    """Trains the last layer at first, and the first one too from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.up)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.up, optimizer, lr=0.05)


class TwoLayers(Boring):
    def __init__(self) -> None:
        super().__init__()
        del self.layer
        self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


def with_options(parallel: dict[str, Any]) -> dict[str, Any]:
    rules = {"rules": RULES}
    return {name: parallel_run("transformer", parallel, strategy=rules, **options) for name, options in OPTIONS.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", SPECS)
def test_accumulation_and_clipping_are_those_of_one_device(spec: str) -> None:
    found = run_on_ranks(4, with_options, SPECS[spec])[1]
    for name, options in OPTIONS.items():
        assert_same(found[name], serial("transformer", **options))


class TorchClips(Characterwise):
    """Clips its gradients with torch's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", SPECS)
def test_torch_clips_what_the_strategy_has(spec: str) -> None:
    found = run_on_ranks(4, parallel_run, "transformer", SPECS[spec], TorchClips, strategy={"rules": RULES})
    assert_same(found[1], serial("transformer", TorchClips))


class ByNorms(Characterwise):
    def configure_optimizers(self) -> Any:
        return Lamb(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


class LambByName(Characterwise):
    def configure_optimizers(self) -> Any:
        return named_optimizer(self, dict(name="lamb", lr=1e-2, eps=1e-4, weight_decay=0.1))


class MuonByName(Characterwise):
    """Its groups are those of roles."""

    def configure_optimizers(self) -> Any:
        made = named_optimizer(self, dict(name="muon", lr=1e-2, adamw_lr=1e-3, adamw_eps=1e-4, ns_dtype="same"))
        assert [group["role"] for group in made.param_groups] == [*ROLES]
        assert sum(len(group["params"]) > 0 for group in made.param_groups) >= 3
        return made


class ByRows(Characterwise):
    def configure_optimizers(self) -> Any:
        return Came(self.parameters(), lr=1e-3, eps=(1e-12, 1e-8))


def norms_and_rows(parallel: dict[str, Any], makes: list[Any]) -> list[Any]:
    return [parallel_run("transformer", parallel, make, strategy={"rules": RULES}) for make in makes]


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_optimizers_that_see_norms_and_rows_step_as_on_one_device(turn: int) -> None:
    """Each optimizer under one of the specs; the slow half has the other one. Norms are split by ``tensor``, rows by ZeRO."""
    for number, make in enumerate((ByNorms, ByRows)):
        spec = list(SPECS)[(number + turn) % 2]
        assert_same(run_on_ranks(4, norms_and_rows, SPECS[spec], [make])[0][0], serial("transformer", make), 1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", SPECS)
def test_optimizers_by_name_step_as_on_one_device(spec: str) -> None:
    wanted = serial("transformer", ByNorms), serial("transformer", MuonByName)
    found = run_on_ranks(4, norms_and_rows, SPECS[spec], [LambByName, MuonByName])[0]
    for run, alone in zip(found, wanted, strict=True):
        assert_same(run, alone, 1e-4)


def test_a_name_that_is_unknown_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(SpecError, match="Did you mean 'lamb'"):
        named_optimizer(nn.Linear(2, 2), dict(name="lambb", lr=0.1))
    with pytest.raises(SpecError, match="optimizer=None: write dict"):
        named_optimizer(nn.Linear(2, 2), None)  # type: ignore[arg-type]


def gans(parallel: dict[str, Any]) -> list[Any]:
    return [parallel_run("boring", parallel, make) for make in (Pair, Untoggled)]


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", SPECS)
def test_several_optimizers_train_apart(spec: str) -> None:
    found = run_on_ranks(4, gans, SPECS[spec])[0]
    for run, make in zip(found, (Pair, Untoggled), strict=True):
        assert_same(run, serial("boring", make))


@ranks(4)
def test_micro_steps_of_an_accumulation_do_not_communicate() -> None:
    with record() as log:
        parallel_run("boring", {}, accumulate_grad_batches=3, max_epochs=1)
    sizes = [entry.block_bytes for entry in log.entries if entry.kind == "all_reduce"]
    # 24 rows in batches of 8 are one step, whose gradients travel once: 66 numbers, each parameter from a multiple of 16 on.
    assert sizes.count((64 + 16 + 2) * 4) == 1


def in_precisions(parallel: dict[str, Any]) -> dict[str, Any]:
    from meshfold.lightning import MeshfoldPrecision

    found = {}
    for precision in ("64-true", "bf16-mixed", "16-mixed", "bf16-true"):
        found[precision] = parallel_run(
            "transformer", parallel, strategy={"rules": RULES}, plugins=[MeshfoldPrecision(precision)]
        )
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", SPECS)
def test_precisions_follow_float32_as_far_as_they_can(spec: str) -> None:
    wanted = serial("transformer")
    for precision, (losses, weights) in run_on_ranks(4, in_precisions, SPECS[spec])[0].items():
        far = max(abs(mine - theirs) for mine, theirs in zip(losses, wanted[0], strict=True))
        assert far < (0.03 if "16" in precision else 1e-5), (precision, far)
        assert losses[-1] < losses[0]
        dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
        assert {value.dtype for value in weights.values()} == {dtype}, precision


class Normed(Boring):
    """With running statistics, of rows that are alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))  # type: ignore[assignment]


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("parallel", [{}, ZERO], ids=["data", "zero 3"])
@ranks(2)
def test_batch_norm_in_16_bits(parallel: dict[str, Any], precision: str) -> None:
    from meshfold.lightning import MeshfoldPrecision

    plain = parallel_run("boring", parallel, Normed)
    found = parallel_run("boring", parallel, Normed, plugins=[MeshfoldPrecision(precision)])
    assert max(abs(a - b) for a, b in zip(plain[0], found[0], strict=True)) < 0.1
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert found[1]["layer.1.running_var"].dtype == dtype


@ranks(2)
def test_a_step_that_overflows_under_fp16_is_left_out_and_the_scale_falls() -> None:
    from meshfold.engine.precision import ScaleSettings
    from meshfold.lightning import MeshfoldPrecision

    class Overflows(Boring):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = self.step(batch)
            return loss * float("inf") if batch_idx == 1 else loss

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.before = self.layer.bias.detach().clone()

        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            assert torch.equal(self.before, self.layer.bias) == (batch_idx == 1)

    plugin = MeshfoldPrecision("16-mixed", ScaleSettings(initial_scale=64.0))
    strategy = strategy_of({})
    trainer_of(strategy, plugins=[plugin], max_epochs=1).fit(Overflows(), DataLoader(Rows(), batch_size=4))
    assert plugin.scaler.scale == 32.0
    strategy.close()


@ranks(4)
def test_what_configure_model_makes_is_the_same_under_every_spec_and_never_whole() -> None:
    class Sharded(Characterwise):
        def __init__(self) -> None:
            super().__init__(late=True)

        def configure_optimizers(self) -> Any:
            assert self.model is not None
            self.local = sum(p.numel() for p in self.model.parameters())
            return super().configure_optimizers()

    class Older(Sharded):
        configure_model = LightningModule.configure_model

        def configure_sharded_model(self) -> None:
            Sharded.configure_model(self)

    rules = {"rules": RULES}
    first = parallel_run("transformer", {}, Sharded, rules)
    for make, parallel in ((Sharded, TENSOR), (Older, ZERO)):
        assert_same(parallel_run("transformer", parallel, make, rules), first)


@ranks(4)
def test_dropout_drops_the_same_under_every_spec() -> None:
    class Drops(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(GPTConfig(vocab_size=32, hidden=16, layers=1, heads=4, max_positions=8, dropout=0.3))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return self.model(batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    # One data coordinate and two: rows go to ranks in turn, so give all of them the same rows.
    first = parallel_run("transformer", {"tensor": 4}, Drops)
    assert_same(parallel_run("transformer", {"data": 1, "tensor": {"mode": "2d", "size": 4}}, Drops), first)


@ranks(2)
def test_sequences_are_split_inside_of_the_model() -> None:
    class Whole(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(GPTConfig(vocab_size=32, hidden=16, layers=1, heads=4, max_positions=8))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            logits = self.model(batch[0]).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    first = parallel_run("transformer", {"tensor": 2}, Whole)
    strategy, notes = strategy_of({"sequence": {"mode": "ulysses", "size": 2}}), Notes()
    from lightning_cases import ROWS, Characters

    trainer = trainer_of(strategy, [notes])
    trainer.fit(Whole(), DataLoader(Characters(), batch_size=ROWS))
    assert_same((notes.losses, strategy.full_state_dict()), first)
    strategy.close()


class ReadsLogits(LightningModule):
    """Trains on the loss that its model has computed, and on one of the logits beside it."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        config = transformers.GPT2Config(vocab_size=37, n_embd=16, n_layer=1, n_head=4, n_positions=8)
        config.update(dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0))
        self.model = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        output = self.model(batch[0], labels=batch[0])
        assert output.logits.shape == (*batch[0].shape, 37) and output.logits.dtype == torch.float32
        loss: Tensor = output.loss + nn.functional.cross_entropy(output.logits.mT, batch[1])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@ranks(2)
def test_logits_beside_a_loss_are_whole() -> None:
    wanted = serial("transformer", ReadsLogits)
    for precision, tolerance in (("32-true", 1e-5), ("bf16-mixed", 0.05)):
        found = parallel_run("transformer", {"tensor": 2}, ReadsLogits, precision=precision)
        assert_same(found, wanted, tolerance)


class Thaws(TwoLayers):
    """Freezes a layer and thaws it in the second epoch; the optimizer has had it all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.up.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def thawed(parallel: dict[str, Any]) -> Any:
    return {
        "callback": parallel_run("boring", parallel, TwoLayers, callbacks=[Thaw()]),
        "hook": parallel_run("boring", parallel, Thaws),
        "hook, with masters": parallel_run("boring", parallel, Thaws, precision="bf16-mixed"),
    }


def test_layers_may_be_thawed_and_given_to_the_optimizer_while_the_fit_runs() -> None:
    found = run_on_ranks(4, thawed, TENSOR)[0]
    assert_same(found["callback"], serial("boring", TwoLayers, callbacks=[Thaw()]))
    wanted = serial("boring", Thaws)
    assert_same(found["hook"], wanted)
    assert_same(found["hook, with masters"], wanted, 0.02)


@ranks(4)
def test_under_zero_what_is_trained_stays_as_it_was_laid_out() -> None:
    with pytest.raises(SpecError, match="frozen, thawed or added to an optimizer while the fit runs"):
        parallel_run("boring", ZERO, Thaws)


@ranks(2)
def test_early_stopping_stops_all_ranks_at_once() -> None:
    strategy, notes = strategy_of({}), Notes()
    stop = EarlyStopping("seen", patience=0, min_delta=10.0, check_on_train_epoch_end=False)
    trainer = trainer_of(strategy, [notes, stop], max_epochs=5)
    from lightning_cases import Characters

    trainer.fit(Characterwise(), DataLoader(Characters(), batch_size=4), DataLoader(Characters(), batch_size=4))
    assert trainer.current_epoch == 2
    assert len(notes.losses) == 6
    strategy.close()


@ranks(2)
def test_what_would_go_wrong_in_silence_is_an_error() -> None:
    class Behind(Boring):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.step(batch))
            self.optimizers(use_pl_optimizer=False).step()  # type: ignore[union-attr]

    class Twice(Boring):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.step(batch))
            self.clip_gradients(self.optimizers(), 1.0, "norm")  # type: ignore[arg-type]
            self.manual_backward(self.step(batch))

    class Shared(Boring):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.parameters(), lr=0.1),
                torch.optim.SGD(self.layer.parameters(), lr=0.1),
            ]

    class Foreign(Boring):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)

    class Closure(Boring):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    for module, error, said in (
        (Behind(), TrainingError, "behind the strategy's back"),
        (Twice(), TrainingError, "after clip_gradients"),
        (Shared(), SpecError, "'layer.weight' is in optimizer 0 and in optimizer 1"),
        (Foreign(), SpecError, "is not a parameter of the module"),
        (Closure(), SpecError, "LBFGS"),
    ):
        strategy = strategy_of({})
        with pytest.raises(error, match=said):
            trainer_of(strategy).fit(module, DataLoader(Rows(), batch_size=4))


@ranks(2)
def test_under_zero_an_optimizer_trains_whole_submodules() -> None:
    class Halves(Pair):
        def configure_optimizers(self) -> Any:
            first, last = self.maker.up, [*self.maker.down.parameters(), *self.judge.parameters()]
            return [torch.optim.SGD(first.parameters(), lr=0.5), torch.optim.SGD(last, lr=0.5)]

    with pytest.raises(SpecError, match="'maker' is trained by optimizers 0 and 1"):
        trainer_of(strategy_of(ZERO)).fit(Halves(), DataLoader(Rows(), batch_size=4))
    with pytest.raises(SpecError, match=r"placement='auto'.*2 optimizers"):
        trainer_of(strategy_of({"zero": {"stage": 3}})).fit(Pair(), DataLoader(Rows(), batch_size=4))
