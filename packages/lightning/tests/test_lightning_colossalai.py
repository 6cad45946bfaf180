"""What users of Lightning's old strategy ``colossalai`` did with it: each works, or is refused in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning", reason="needs meshfold[lightning]")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch.utils.data import DataLoader

from meshfold.lightning import ColossalAIStrategy, MeshfoldPrecision, RunningRanks
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.zero_gemini import HybridAdam

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from lightning_cases import QUIET, Boring, Rows, assert_same, be_quiet, parallel_run, serial

ZERO: dict[str, Any] = {"zero": {"stage": 3, "placement": "cuda"}}


class Late(LightningModule):
    """Layers made in ``configure_sharded_model``, as the old strategy wanted them."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.layer: nn.Module | None = None
        self.again = again

    def configure_sharded_model(self) -> None:
        if self.layer is None or self.again:
            self.layer = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2))

    def loss(self, batch: Tensor) -> Tensor:
        assert self.layer is not None
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.layer is not None
        return self.layer(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = HybridAdam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]


def trainer_of(out: Path | str = ".", **options: Any) -> Trainer:
    be_quiet()
    strategy = ColossalAIStrategy(cluster_environment=RunningRanks())
    settings = {**QUIET, "max_epochs": 2, "precision": "16-mixed", **options}
    devices = RunningRanks().world_size()
    return Trainer(strategy=strategy, devices=devices, default_root_dir=str(out), **settings)


def data() -> DataLoader[Tensor]:
    return DataLoader(Rows(), batch_size=4)


@pytest.mark.filterwarnings("ignore:You have overridden")
@ranks(2)
def test_fit_then_test_then_predict(tmp_path: Path) -> None:
    trainer, module = trainer_of(), Late()
    trainer.fit(module, data(), data())
    [tested] = trainer.test(module, data(), verbose=False)
    assert tested["test_loss"] == pytest.approx(float(trainer.callback_metrics["test_loss"]))
    assert torch.cat(trainer.predict(module, data())).isfinite().all()  # type: ignore[arg-type]
    alone = trainer_of()
    assert alone.test(Late(), data(), verbose=False)[0]["test_loss"] > tested["test_loss"]  # without a fit


@pytest.mark.filterwarnings("ignore:You have overridden")
@ranks(2)
def test_a_fit_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path, max_epochs=2)
    whole.fit(kept := Late(), data())
    first = trainer_of(tmp_path, max_epochs=1)
    torch.manual_seed(0)
    first.fit(Late(), data())
    path = tmp_path / "first.ckpt"
    first.save_checkpoint(path)
    again = trainer_of(tmp_path, max_epochs=2)
    again.fit(module := Late(), data(), ckpt_path=str(path))
    assert again.global_step == whole.global_step
    for mine, other in zip(kept.parameters(), module.parameters(), strict=True):
        assert mine.shape == other.shape and (not mine.numel() or mine.isfinite().all())


@pytest.mark.filterwarnings("ignore:You have overridden")
@ranks(2)
def test_layers_that_are_made_anew_for_every_stage_are_refused() -> None:
    trainer, module = trainer_of(), Late(again=True)
    trainer.fit(module, data())
    with pytest.raises(SpecError, match=r"begin it with 'if self.model is not None: return'"):
        trainer.test(module, data(), verbose=False)


class Plain(Boring):
    """With an optimizer of torch, and a backward of its own."""

    backwards = 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.backwards += 1
        loss.backward()


@ranks(2)
def test_what_the_old_strategy_refused_works() -> None:
    """Another optimizer, a backward of one's own, clipping by value, accumulation, other precisions, the CPU."""
    for options in (
        dict(gradient_clip_val=0.1, gradient_clip_algorithm="value"),
        dict(gradient_clip_val=0.1, accumulate_grad_batches=2),
        dict(precision="bf16-mixed"),
    ):
        module = Plain()
        trainer = trainer_of(**{"precision": "32-true", "max_epochs": 1, **options})
        trainer.fit(module, data())
        assert module.backwards == 3
        assert trainer.global_step == (2 if "accumulate_grad_batches" in options else 3)


def scheduled(parallel: dict[str, Any]) -> Any:
    callbacks = [GradientAccumulationScheduler(scheduling={1: 3, 2: 2})]
    return parallel_run("boring", parallel, callbacks=callbacks, max_epochs=4)


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", [{}, ZERO], ids=["data", "zero 3"])
def test_an_accumulation_that_changes_is_that_of_one_device(parallel: dict[str, Any]) -> None:
    scheduler = GradientAccumulationScheduler(scheduling={1: 3, 2: 2})
    wanted = serial("boring", callbacks=[scheduler], max_epochs=4)
    assert_same(run_on_ranks(2, scheduled, parallel)[1], wanted)


class Grows(Callback):
    """Changes what a step is made of, without a word before."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch


@ranks(2)
def test_an_accumulation_that_grows_unannounced_is_refused_under_zero() -> None:
    with pytest.raises(SpecError, match=r"accumulate_grad_batches grew from 1 to 2 .*GradientAccumulationScheduler"):
        parallel_run("boring", ZERO, callbacks=[Grows()])


class Two(Boring):
    """Two optimizers of the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layer.parameters(), lr=0.1) for _ in range(2)]


@ranks(2)
def test_two_optimizers_of_one_parameter_are_refused() -> None:
    with pytest.raises(SpecError, match=r"is in optimizer 0 and in optimizer 1"):
        trainer_of().fit(Two(), data())


def test_precisions_that_there_are_not_are_refused() -> None:
    with pytest.raises(SpecError, match="precision='transformer-engine'"):
        MeshfoldPrecision("transformer-engine")
