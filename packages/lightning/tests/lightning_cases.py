"""What the Lightning tests share: modules, data, and runs under a spec beside runs of Lightning on one device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.demos.transformer import Transformer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from meshfold.lightning import MeshfoldStrategy, RunningRanks

SEED, ROWS = 3, 8
QUIET: dict[str, Any] = dict(
    accelerator="cpu",
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    enable_checkpointing=False,
)
TEXT = "The mesh folds one model over many devices, and each of them holds the part that is its own. " * 3


def be_quiet() -> None:
    """Lightning says a lot."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Rows(Dataset[Tensor]):
    """Rows of numbers, the same for all who ask."""

    def __init__(self, count: int = 24, size: int = 32) -> None:
        self.rows = torch.randn(count, size, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text as numbers, each with the piece one character later."""

    length = 8

    def __init__(self) -> None:
        letters = sorted(set(TEXT))
        self.ids = torch.tensor([letters.index(letter) for letter in TEXT])

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        return self.ids[start : start + self.length], self.ids[start + 1 : start + 1 + self.length]


class Boring(BoringModel):
    """Lightning's, which notes its losses."""


class Manual(ManualOptimBoringModel):
    """Lightning's, with a loop of its own."""


class Characterwise(LightningModule):
    """Lightning's example Transformer on characters, as its LightningTransformer trains it, small and without dropout."""

    def __init__(self, *, late: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.late, self.dropout = late, dropout
        self.model: nn.Module | None = None if late else self.made()

    def made(self) -> nn.Module:
        return Transformer(vocab_size=32, ninp=16, nhead=2, nhid=32, nlayers=1, dropout=self.dropout)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.made()

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert self.model is not None
        inputs, target = batch
        return F.nll_loss(self.model(inputs, target), target.view(-1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("seen", self.step(batch), sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("tested", self.step(batch), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        predicted: Tensor = self.model(*batch)
        return predicted.argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


RULES = {"model.transformer": "replicate"}
"""The blocks stay whole; embedding and decoder are split."""

MODULES: dict[str, Callable[[], LightningModule]] = {
    "boring": Boring,
    "manual": Manual,
    "transformer": Characterwise,
}
DATA: dict[str, Callable[[], Any]] = {"boring": Rows, "manual": Rows, "transformer": Characters}


class Notes(Callback):
    """Notes every training loss, the mean over the data coordinates."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(trainer.strategy.reduce(loss.detach() * trainer.accumulate_grad_batches)))


def loader(kind: str, rows: int = ROWS, *, replicas: int = 1, rank: int = 0) -> DataLoader[Any]:
    """Batches in the order in which Lightning deals them to the ranks of a sampler."""
    data = DATA[kind]()
    sampler: DistributedSampler[Any] = DistributedSampler(data, replicas, rank, shuffle=True, seed=SEED)
    return DataLoader(data, batch_size=rows, sampler=sampler)


Run = tuple[list[float], dict[str, Tensor]]
"""Losses and final weights."""


def serial(
    kind: str,
    make: Callable[[], LightningModule] | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Run:
    """Losses and final weights of Lightning alone, on one device."""
    be_quiet()
    seed_everything(SEED, verbose=False)
    module, notes = (make or MODULES[kind])(), Notes()
    settings: dict[str, Any] = {**QUIET, "max_epochs": 2, **options}
    trainer = Trainer(
        devices=1, strategy="auto", callbacks=[notes, *callbacks], use_distributed_sampler=False, **settings
    )
    trainer.fit(module, loader(kind))
    return notes.losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


def strategy_of(parallel: Any, **options: Any) -> MeshfoldStrategy:
    """Over the ranks of the pool."""
    return MeshfoldStrategy(parallel, cluster_environment=RunningRanks(), **options)


def trainer_of(strategy: MeshfoldStrategy, callbacks: Sequence[Callback] = (), **options: Any) -> Trainer:
    """On all ranks of the pool."""
    be_quiet()
    seed_everything(SEED, verbose=False)
    devices = RunningRanks().world_size()
    return Trainer(
        devices=devices, strategy=strategy, callbacks=list(callbacks), **{**QUIET, "max_epochs": 2, **options}
    )


def parallel_run(
    kind: str,
    parallel: Any,
    make: Callable[[], LightningModule] | None = None,
    strategy: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Run:
    """The same under a spec, on the pool's ranks: every data coordinate has its part of the same global batches."""
    notes, chosen = Notes(), strategy_of(parallel, **(strategy or {}))
    trainer = trainer_of(chosen, [notes, *callbacks], **options)
    module = (make or MODULES[kind])()
    shares = _data_coordinates(parallel, RunningRanks().world_size())
    trainer.fit(module, DataLoader(DATA[kind](), batch_size=ROWS // shares))
    whole = chosen.full_state_dict()
    chosen.close()
    return notes.losses, whole


def _data_coordinates(parallel: dict[str, Any], world: int) -> int:
    tensor = parallel.get("tensor", 1)
    return world // (tensor["size"] if isinstance(tensor, dict) else tensor)


def assert_same(found: Run, wanted: Run, tolerance: float = 1e-5) -> None:
    """Losses step by step, and final weights by name."""
    assert len(found[0]) == len(wanted[0]) > 3
    for step, (mine, theirs) in enumerate(zip(found[0], wanted[0], strict=True)):
        assert abs(mine - theirs) <= tolerance, f"step {step}: {mine} and {theirs}"
    assert found[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        torch.testing.assert_close(
            found[1][name], value, rtol=0, atol=tolerance * 10, msg=lambda m, n=name: f"{n}: {m}"
        )
