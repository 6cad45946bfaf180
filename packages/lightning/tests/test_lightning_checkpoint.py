"""Checkpoints of Lightning trainers: written under one spec, gone on with under another, and by Lightning alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning", reason="needs meshfold[lightning]")

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from meshfold.checkpoint import FileWriteError
from meshfold.engine import CheckpointError
from meshfold.lightning import RunningRanks, consolidate
from meshfold.mesh.testing import ranks, run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from lightning_cases import (
    QUIET,
    ROWS,
    RULES,
    SEED,
    Boring,
    Characters,
    Characterwise,
    Notes,
    Rows,
    assert_same,
    be_quiet,
    loader,
    serial,
    strategy_of,
    trainer_of,
)

TENSOR, ZERO = {"data": 2, "tensor": 2}, {"zero": {"stage": 3, "placement": "cuda"}}


class Kept(Characterwise):
    """Keeps hyper-parameters, and something of its own."""

    def __init__(self, name: str = "mesh") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.found = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = "mine"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["own"]


def fit(
    parallel: dict[str, Any], epochs: int, *, folder: str = "", path: str | None = None, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on the pool, with a checkpoint an epoch if there is a folder, and from one if there is a path."""
    strategy, notes = strategy_of(parallel, rules=RULES, **options), Notes()
    keeping = (
        [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)] if folder else []
    )
    trainer = trainer_of(strategy, [notes, *keeping], max_epochs=epochs, enable_checkpointing=bool(folder))
    module = Kept("net")
    shares = RunningRanks().world_size() // int(parallel.get("tensor", 1))
    trainer.fit(module, DataLoader(Characters(), batch_size=ROWS // shares), ckpt_path=path)
    assert module.found == ("mine" if path else "")
    whole = strategy.full_state_dict()
    strategy.close()
    return notes.losses, whole


def go_on(path: str, parallel: dict[str, Any], **options: Any) -> Any:
    return fit(parallel, 2, path=path, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_training_goes_on_under_another_spec_and_number_of_ranks(kind: str, tmp_path: Path) -> None:
    wanted = run_on_ranks(4, fit, TENSOR, 2, folder=str(tmp_path), checkpoints=kind)[0]
    assert_same(wanted, serial("transformer", Kept))
    saved = str(tmp_path / "epoch=0.ckpt")
    assert Path(saved).is_dir() == (kind == "folder")
    for count, parallel in ((2, ZERO), (2, {}), (1, {}), (4, {"zero": {"stage": 2}})):
        losses, weights = run_on_ranks(count, go_on, saved, parallel)[0]
        assert_same(([*wanted[0][:3], *losses], weights), wanted)


def test_lightning_alone_goes_on_from_both_and_we_from_its_own(tmp_path: Path) -> None:
    wanted = run_on_ranks(2, fit, ZERO, 2, folder=str(tmp_path / "ours"))[0]
    file = tmp_path / "file.ckpt"
    consolidate(tmp_path / "ours" / "epoch=0.ckpt", file)
    with pytest.raises(FileWriteError, match=r"missing/file\.ckpt.*No such file or directory: make its folder"):
        consolidate(tmp_path / "ours" / "epoch=0.ckpt", tmp_path / "missing" / "file.ckpt")
    module = Kept.load_from_checkpoint(file)
    assert module.hparams["name"] == "net"
    assert_same(alone(tmp_path, ckpt_path=str(file), before=wanted[0][:3]), wanted)
    theirs = serial_checkpoint(tmp_path)
    losses, weights = run_on_ranks(4, go_on, theirs, TENSOR)[0]
    assert_same(([*wanted[0][:3], *losses], weights), wanted)


def alone(folder: Path, *, ckpt_path: str, before: list[float]) -> tuple[list[float], dict[str, Tensor]]:
    """Lightning's own trainer on one device, from a file."""
    be_quiet()
    module, notes = Kept(), Notes()
    settings = {**QUIET, "max_epochs": 2}
    trainer = Trainer(devices=1, strategy="auto", callbacks=[notes], use_distributed_sampler=False, **settings)
    trainer.fit(module, loader("transformer"), ckpt_path=ckpt_path, weights_only=False)
    return [*before, *notes.losses], module.state_dict()


def serial_checkpoint(folder: Path) -> str:
    be_quiet()
    seed_everything(SEED, verbose=False)
    keeping = ModelCheckpoint(folder / "theirs", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    settings = {**QUIET, "max_epochs": 2, "enable_checkpointing": True}
    trainer = Trainer(devices=1, strategy="auto", callbacks=[keeping], use_distributed_sampler=False, **settings)
    trainer.fit(Kept(), loader("transformer"))
    return str(folder / "theirs" / "epoch=0.ckpt")


def two_optimizers(parallel: dict[str, Any], folder: str) -> None:
    from test_lightning_training import Pair

    class Moving(Pair):
        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.maker.parameters(), lr=0.1, momentum=0.9),
                torch.optim.AdamW(self.judge.parameters(), lr=0.01),
            ]

    strategy = strategy_of(parallel)
    trainer = trainer_of(strategy, max_epochs=1)
    trainer.fit(Moving(), DataLoader(Rows(), batch_size=4))
    trainer.save_checkpoint(folder)
    wanted = [strategy.optimizer_state(o) for o in trainer.optimizers]
    strategy.close()
    again = strategy_of(parallel, checkpoints="file")
    trainer = trainer_of(again, max_epochs=1)
    trainer.fit(Moving(), DataLoader(Rows(), batch_size=4), ckpt_path=folder)
    assert wanted == [{}, {}]  # of a folder, nothing is gathered
    for optimizer, entries in zip(
        trainer.optimizers, ({"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}), strict=True
    ):
        state = again.optimizer_state(optimizer)
        assert all(set(found) == entries for found in state["state"].values())
        if strategy.is_global_zero:
            assert list(state["state"]) == [0, 1, 2, 3]
            assert state["state"][0][max(entries)].abs().sum() > 0
    again.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", [TENSOR, ZERO], ids=["data 2 × tensor 2", "zero 3"])
def test_several_optimizers_are_kept_apart(parallel: dict[str, Any], tmp_path: Path) -> None:
    run_on_ranks(4, two_optimizers, parallel, str(tmp_path / "pair.ckpt"))


@ranks(2)
def test_weights_alone_and_partly_strict(tmp_path: Path) -> None:
    strategy = strategy_of({"tensor": 2})
    trainer = trainer_of(strategy, max_epochs=1)
    trainer.fit(Boring(), DataLoader(Rows(), batch_size=8))
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    wanted = strategy.full_state_dict()
    assert not (tmp_path / "weights.ckpt" / "optimizer.safetensors").exists()
    strategy.close()

    class More(Boring):
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(2, 2)

    strategy = strategy_of({})
    module = More()
    before = module.more.weight.detach().clone()
    trainer_of(strategy).test(
        module, DataLoader(Rows(), batch_size=8), ckpt_path=tmp_path / "weights.ckpt", verbose=False
    )
    found = strategy.full_state_dict()
    torch.testing.assert_close(found["layer.weight"], wanted["layer.weight"])
    torch.testing.assert_close(found["more.weight"], before)
    strategy.close()


@ranks(2)
def test_what_is_no_checkpoint_of_this_module_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    strategy = strategy_of({})
    trainer = trainer_of(strategy, max_epochs=1)
    trainer.fit(Boring(), DataLoader(Rows(), batch_size=8))
    trainer.save_checkpoint(tmp_path / "boring.ckpt")
    strategy.close()
    with pytest.raises(CheckpointError, match=r"has no 'layer\.weight'"):
        trainer_of(strategy_of({})).fit(
            Characterwise(), DataLoader(Characters(), batch_size=4), ckpt_path=tmp_path / "boring.ckpt"
        )

    class Adaptive(Boring):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters())

    with pytest.raises(CheckpointError, match="has the state of SGD, but this engine has Adagrad"):
        trainer_of(strategy_of({})).fit(
            Adaptive(), DataLoader(Rows(), batch_size=4), ckpt_path=tmp_path / "boring.ckpt"
        )
