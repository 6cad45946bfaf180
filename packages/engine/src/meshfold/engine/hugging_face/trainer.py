"""The Trainer of ``transformers`` over an engine: its arguments, callbacks, logging and checkpoint folders; our parallelism.

The engine has model, optimizer, precision, clipping and accumulation; the Trainer loops, sets the learning rate, logs,
evaluates and decides when to save. Accelerate, beneath the Trainer, must not wrap the model once more, and does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer

from meshfold.engine.batches.loader import ShardedLoader
from meshfold.engine.engine import Engine
from meshfold.mesh import SpecError

_NEVER_CALLED = {
    "compute_loss_func": "the loss is the engine's, write Engine(..., loss_fn=...)",
    "compute_metrics": "evaluation gives the engine's loss alone, other numbers take engine(...) in a loop of your own",
}

_FOLDER = "meshfold"  # inside of the Trainer's checkpoint folder


class EngineTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """``EngineTrainer(engine, args=TrainingArguments(...), train_dataset=..., ...)``; all ranks make one.

    ``per_device_train_batch_size`` is of a data coordinate. ``learning_rate`` and ``lr_scheduler_type`` are the Trainer's;
    the engine has none of its own. Checkpoints load under any other spec.

    Raises:
        SpecError: where the engine was made for another accumulation, clipping or precision than the arguments say, and for
            functions that nobody would call.
    """

    control: Any

    def __init__(self, engine: Engine, **settings: Any) -> None:
        """Args:
        engine: with an optimizer, and without ``lr_scheduler``.
        settings: of ``transformers.Trainer``, save ``model`` and ``optimizers``.
        """
        if engine.optimizer is None or engine.lr_scheduler is not None:
            raise SpecError(
                "EngineTrainer needs an engine with an optimizer and without lr_scheduler: the Trainer has one"
            )
        self.engine = engine
        super().__init__(model=engine.model, optimizers=(_Stepped(engine.optimizer), None), **settings)
        for name, here, there, option in (
            ("gradient_accumulation", engine._accumulation, self.args.gradient_accumulation_steps, "gradient_accumulation_steps"),
            ("clip_grad_norm", engine._clip.norm, self.args.max_grad_norm or None, "max_grad_norm"),
        ):  # fmt: skip
            if here != there:
                raise SpecError(
                    f"Engine(..., {name}={here!r}) and TrainingArguments({option}={there!r}): the engine does this, so give "
                    "both the same"
                )
        self._check_precision()
        for name, instead in _NEVER_CALLED.items():
            if settings.get(name) is not None:
                raise SpecError(f"EngineTrainer(..., {name}=...) would never be called: {instead}")
        rates = {"lr": self.args.learning_rate, "initial_lr": self.args.learning_rate}
        for group in engine.optimizer.param_groups:
            group.update(rates)

    def _check_precision(self) -> None:
        """Whether the arguments ask for a precision that the engine does not have."""
        here = self.engine._precision.name
        for name in ("bf16", "fp16"):
            if getattr(self.args, name) and here != name:
                raise SpecError(
                    f"TrainingArguments({name}=True), and the engine computes in {here}: write Engine(..., precision={name!r})"
                )

    # -- the loop's parts ------------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: object = None
    ) -> Tensor:
        loss = self.engine.train_step(dict(inputs))
        return torch.tensor(loss / self.args.gradient_accumulation_steps, device=self.args.device)

    def get_train_dataloader(self) -> DataLoader[Any]:
        world, dataset, rows = self.engine._world, self.train_dataset, self.args.per_device_train_batch_size
        if len(dataset) < rows * world.row_size:
            raise SpecError(
                f"a dataset of {len(dataset)} rows has no global batch of {rows} × {world.row_size} rows: use a smaller "
                "batch size for each device"
            )
        seed = self.args.data_seed or self.args.seed
        batches = _RowsOfBatches(len(dataset), rows, world.row_index, world.row_size, seed)
        return _Loader(
            dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> ShardedLoader:
        """Every row once, in order; of a last batch that is smaller each data coordinate has its part, which may be none."""
        world = self.engine._world
        return ShardedLoader(
            self.eval_dataset if eval_dataset is None else eval_dataset,
            batch_size=self.args.per_device_eval_batch_size * world.row_size,
            index=world.row_index,
            blocks=world.row_size,
            shuffle=False,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """``eval_loss``: the mean over all targets of the dataset that count, however many ranks and rows a batch; all ranks
        call. nan if none counts."""
        total, count = 0.0, 0
        for fields in self.get_eval_dataloader(eval_dataset):
            loss, targets = self.engine._assessed(dict(fields))
            total += loss * targets if targets else 0.0
            count += targets
        metrics = {f"{metric_key_prefix}_loss": total / count if count else math.nan}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # -- what accelerate would do ----------------------------------------------------------------------------------

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Anything else than the model itself, and it is taken for wrapped already."""
        return model if isinstance(model, nn.ModuleList) else nn.ModuleList([model])

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> float | None:
        return None if self.engine.last is None else self.engine.last.grad_norm

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.engine.save(Path(output_dir or self.args.output_dir) / _FOLDER)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:  # the optimizer's state is in the engine's folder
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.engine.load(Path(resume_from_checkpoint) / _FOLDER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(
                torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            )
            # A scheduler counts on the optimizer's state to bring the rate; this one was made after that was loaded.
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate


class _Stepped(torch.optim.Optimizer):
    """The engine's optimizer, as the Trainer and its scheduler see it: the same groups, and steps that are made already."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._of: torch.optim.Optimizer | None = None
        self._own: list[dict[str, Any]] = []
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self._of = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The engine's of now: loading a checkpoint makes others."""
        return self._own if self._of is None else self._of.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._own = groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """``train_step`` has done it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: accelerate loads what it has just asked for, which would put copies in the groups' place."""


class _RowsOfBatches(Sampler[list[int]]):
    """This data coordinate's rows of global batches to train on; what does not fill one is left out of the epoch."""

    def __init__(self, length: int, rows: int, index: int, blocks: int, seed: int) -> None:
        """``seed``: of the order, another one each epoch."""
        self._length, self._rows, self._index, self._blocks, self._seed = length, rows, index, blocks, seed
        self.epoch = 0

    def __len__(self) -> int:
        return self._length // (self._rows * self._blocks)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._length, generator=torch.Generator().manual_seed(self._seed + self.epoch))
        for number in range(len(self)):
            start = (number * self._blocks + self._index) * self._rows
            yield order[start : start + self._rows].tolist()


class _Loader(DataLoader[Any]):
    """Tells the order of its epoch, as the Trainer expects of what accelerate makes."""

    def set_epoch(self, epoch: int) -> None:
        """Before each."""
        assert isinstance(self.batch_sampler, _RowsOfBatches)
        self.batch_sampler.epoch = epoch
