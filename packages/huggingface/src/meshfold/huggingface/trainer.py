"""The Trainer of ``transformers`` over an engine: its arguments, callbacks, logging and checkpoint folders, with our parallelism.

The engine has model, optimizer, precision, clipping and accumulation; the Trainer loops, sets the learning rate, logs,
evaluates and decides when to save. Accelerate, beneath the Trainer, must not wrap the model again, and does not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import speed_metrics

from meshfold.checkpoint.files import read_torch_file
from meshfold.engine import Engine, ShardedLoader
from meshfold.huggingface.trainer_metrics import Predictions
from meshfold.huggingface.trainer_rows import Collated, Loader, Rows, RowsOfBatches
from meshfold.mesh import SpecError, all_reduce
from meshfold.mesh.model_io import IGNORE_INDEX

_NEVER_CALLED = {"compute_loss_func": "the loss is the engine's, write Engine(..., loss_fn=...)"}

_FOLDER = "meshfold"  # a folder inside the Trainer's checkpoint


class EngineTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """``EngineTrainer(engine, args=TrainingArguments(...), train_dataset=..., ...)``; all ranks make one.

    ``per_device_train_batch_size`` is per data coordinate. ``learning_rate`` and ``lr_scheduler_type`` are the Trainer's;
    the engine has none of its own. Checkpoints load under any other spec.

    An epoch has every row once, in as many steps as transformers' Trainer makes on as many data coordinates. A smaller last batch
    is divided, unless ``dataloader_drop_last``. Micro-steps of a step are weighted as the Trainer does: by their targets if the
    loss is known, as in causal language models, else equally. Losses are the Trainer's, also for models such as
    ``GPT2LMHeadModel`` where it divides by all labels, although the first of each row is never predicted. ``compute_metrics``
    and ``preprocess_logits_for_metrics`` are called as the Trainer calls them, on all ranks.

    Raises:
        SpecError: if the engine has another accumulation, clipping or precision than the arguments, and for
            functions that would never be called.
    """

    control: Any

    def __init__(self, engine: Engine, **settings: Any) -> None:
        """Args:
        engine: with an optimizer, and without ``lr_scheduler``.
        settings: of ``transformers.Trainer``, except ``model`` and ``optimizers``.
        """
        if engine.optimizer is None or engine.lr_scheduler is not None:
            raise SpecError(
                "EngineTrainer needs an engine with an optimizer and without lr_scheduler: the Trainer has one"
            )
        self.engine = engine
        self._weights: Iterator[float] = iter(())  # weights of the coming micro-steps
        super().__init__(model=engine.model, optimizers=(_Stepped(engine.optimizer), None), **settings)
        runner = engine.runner
        for name, here, there, option in (
            (
                "gradient_accumulation",
                runner.accumulation,
                self.args.gradient_accumulation_steps,
                "gradient_accumulation_steps",
            ),
            ("clip_grad_norm", runner.clipping.norm, self.args.max_grad_norm or None, "max_grad_norm"),
        ):
            if here != there:
                raise SpecError(
                    f"Engine(..., {name}={here!r}) and TrainingArguments({option}={there!r}): the engine does this, so give "
                    "both the same"
                )
        self._check_precision()
        self._check_optimization()
        for name, instead in _NEVER_CALLED.items():
            if settings.get(name) is not None:
                raise SpecError(f"EngineTrainer(..., {name}=...) would never be called: {instead}")
        rates = {"lr": self.args.learning_rate, "initial_lr": self.args.learning_rate}
        for group in engine.optimizer.param_groups:
            group.update(rates)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where the engine has put it: under zero stage 3 its parameters are not there between steps."""

    def _check_precision(self) -> None:
        """Check that the engine has the precision that the arguments ask for."""
        here = self.engine.precision.name
        for name in ("bf16", "fp16"):
            if getattr(self.args, name) and here != name:
                raise SpecError(
                    f"TrainingArguments({name}=True), and the engine computes in {here}: write Engine(..., precision={name!r})"
                )

    def _check_optimization(self) -> None:
        """Refuse arguments that the engine's own optimizer and loss would ignore."""
        decay = self.args.weight_decay
        if decay and not any(group.get("weight_decay") == decay for group in self.optimizer.param_groups):
            raise SpecError(
                f"TrainingArguments(weight_decay={decay}) would not be used, the optimizer is the engine's: write "
                f"Engine(..., optimizer=dict(..., weight_decay={decay}))"
            )
        if self.args.label_smoothing_factor:
            raise SpecError(
                f"TrainingArguments(label_smoothing_factor={self.args.label_smoothing_factor}) would not be used: the loss is "
                "the engine's, write Engine(..., loss_fn=...)"
            )
        if self.args.train_sampling_strategy not in ("random", "sequential"):
            raise SpecError(
                f"TrainingArguments(train_sampling_strategy={self.args.train_sampling_strategy!r}): EngineTrainer has "
                "'random' and 'sequential'"
            )
        if self.args.batch_eval_metrics or "loss" in self.args.include_for_metrics:
            raise SpecError(
                "TrainingArguments(batch_eval_metrics=True) and include_for_metrics=['loss']: EngineTrainer calls compute_metrics "
                "once, with predictions, labels and inputs of all rows: leave them out"
            )

    # -- the loop's parts ------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: object = None) -> Tensor:
        """Run a micro-step on the engine, and return its part of the step's loss; called by ``Trainer``."""
        steps = self.current_gradient_accumulation_steps  # the last step of an epoch may have fewer
        weight = next(self._weights, None)
        with self.engine.runner.accumulating(steps, weight):
            self.engine.run_step(dict(inputs))
        if weight == 0.0:
            return torch.zeros((), device=self.args.device)
        loss = self.engine.runner.loss
        return (loss / steps if weight is None else loss * weight).to(self.args.device, torch.float32)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return the batches of a step, and their weights: as in the Trainer, but by targets over all data coordinates."""
        batches = list(islice(epoch_iterator, num_batches))
        more = self._counts_all_labels(batches)
        weighed = more or (self.model_accepts_loss_kwargs and len(batches) > 1)
        counts = [self.engine.count_targets(dict(fields)) for fields in batches] if weighed else []
        divisor = sum(map(self._labels_of, batches)) if more else sum(counts)
        self._weights = iter([count / divisor for count in counts] if divisor else ())
        return batches, None

    def _counts_all_labels(self, batches: list[Any]) -> bool:
        """Return True if the Trainer divides a loss by all labels, including the first of each row, which is never predicted.

        The Trainer checks ``loss_type``, which some causal language models lack.
        """
        counts = self.model_accepts_loss_kwargs and not self._loss_shifts_labels
        return (
            counts
            and self.engine.runner.forward.shifts_labels
            and bool(batches)
            and isinstance(batches[0], Mapping)
            and batches[0].get("labels") is not None
            and "shift_labels" not in batches[0]
        )

    def _labels_of(self, fields: Mapping[str, Any]) -> int:
        """Return the number of labels of a global batch that are not padding; all ranks must call."""
        world = self.engine.world
        mine = torch.as_tensor(fields["labels"]).ne(IGNORE_INDEX).sum().to(world.device)
        return int(all_reduce(mine, world.row_group))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader with every row once per epoch; a smaller last batch is divided over data coordinates.

        Raises:
            SpecError: without a dataset that has a length, or if it gives no batch.
        """
        world, rows = self.engine.world, self.args.per_device_train_batch_size
        dataset, collate = self._used(self.train_dataset, "train_dataset")
        if self.args.dataloader_drop_last and len(dataset) < rows * world.row_size:
            raise SpecError(
                f"a dataset of {len(dataset)} rows has no global batch of {rows} × {world.row_size} rows: use a smaller "
                "batch size for each device, or dataloader_drop_last=False"
            )
        batches = RowsOfBatches(
            len(dataset),
            rows,
            world.row_index,
            world.row_size,
            self.args.seed if self.args.data_seed is None else self.args.data_seed,
            shuffle=self.args.train_sampling_strategy == "random",
            drop_last=self.args.dataloader_drop_last,
        )
        return Loader(Rows(dataset), batch_sampler=batches, collate_fn=Collated(collate), **self._loading())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> ShardedLoader:
        """Return a loader with every row once, in order; a smaller last batch is divided over data coordinates.

        Args:
            eval_dataset: a dataset, or the name of one where ``eval_dataset`` of the trainer is a dict of them; None: that
                of the trainer.

        Raises:
            SpecError: without a dataset that has a length and rows.
        """
        world, named = self.engine.world, "eval_dataset"
        if isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if eval_dataset not in known:
                raise SpecError(
                    f"evaluate({eval_dataset!r}): the trainer's eval_dataset has {sorted(known) or 'no names'}: give one of "
                    "them, or a dataset"
                )
            named, eval_dataset = f"eval_dataset[{eval_dataset!r}]", known[eval_dataset]
        dataset, collate = self._used(self.eval_dataset if eval_dataset is None else eval_dataset, named)
        return ShardedLoader(
            dataset,
            batch_size=self.args.per_device_eval_batch_size * world.row_size,
            index=world.row_index,
            blocks=world.row_size,
            shuffle=False,
            collate_fn=collate,
            **self._loading(),
        )

    def _used(self, dataset: Any, named: str) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Return the dataset and its collate function, without columns that the model does not take."""
        if dataset is None:
            raise SpecError(f"no data: give EngineTrainer(..., {named}=...)")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise SpecError(
                f"EngineTrainer(..., {named}=...) is {type(dataset).__name__}, a stream: every rank takes its rows by their "
                "numbers, so give a dataset with a length and dataset[i], such as list(stream)"
            )
        if not len(dataset):
            raise SpecError(f"EngineTrainer(..., {named}=...) has 0 rows")
        if hasattr(dataset, "remove_columns"):
            return self._remove_unused_columns(dataset, description=named), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=named)

    def _loading(self) -> dict[str, Any]:
        """Return the arguments' options of torch's loader."""
        names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        return {**options, "pin_memory": options["pin_memory"] and self.engine.device.type == "cuda"}

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return ``eval_loss``: the mean over all targets of the dataset, for any number of ranks and rows per batch; all ranks
        must call. nan if there are no targets. With a dict of datasets, ``eval_NAME_loss`` of each. Also the Trainer's
        ``eval_runtime``, ``eval_samples_per_second`` and ``eval_steps_per_second``."""
        several = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(several, Mapping):
            metrics: dict[str, float] = {}
            for name, each in several.items():
                metrics.update(self.evaluate(each, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        start, total, count = time.time(), 0.0, 0
        loader = self.get_eval_dataloader(eval_dataset)
        predictions = self._predictions(loader, ignore_keys)
        for fields in loader:
            loss, targets = self.engine.eval_loss(dict(fields))
            total += loss * targets if targets else 0.0
            count += self._labels_of(fields) if self._counts_all_labels([fields]) else targets
            if predictions is not None:
                name = getattr(self.model, "main_input_name", "input_ids")
                inputs = fields[name] if "inputs" in self.args.include_for_metrics else None
                predictions.add(fields, inputs)
        metrics = {f"{metric_key_prefix}_loss": total / count if count else math.nan}
        if predictions is not None:
            own = predictions.metrics(self.compute_metrics)
            begin = f"{metric_key_prefix}_"
            metrics.update({name if name.startswith(begin) else begin + name: own[name] for name in own})
        metrics.update(speed_metrics(metric_key_prefix, start, num_samples=len(loader.dataset), num_steps=len(loader)))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _predictions(self, loader: ShardedLoader, ignore_keys: Any) -> Predictions | None:
        """Return the collector of predictions for metrics; None if no metrics are computed."""
        if self.compute_metrics is None or self.args.prediction_loss_only:
            return None
        config = getattr(self.model, "config", None)
        left_out = ignore_keys or getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        return Predictions(
            self.engine,
            len(loader.dataset),
            loader.batch_size,
            labels=self.label_names,
            left_out=left_out,
            preprocess=self.preprocess_logits_for_metrics,
        )

    def predict(self, *args: Any, **settings: Any) -> Any:
        """Refuse prediction, since ranks have only parts of the outputs.

        Raises:
            SpecError: always.
        """
        raise SpecError(
            "EngineTrainer has no predict: evaluate(dataset) gives its loss, and for outputs call engine.model under "
            "torch.no_grad() in a loop of your own, or the Trainer alone on the folder that engine.save_hugging_face writes"
        )

    # -- what accelerate would do ----------------------------------------------------------------------------------

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return an object that is not the model, so that the Trainer treats the model as already wrapped."""
        return model if isinstance(model, nn.ModuleList) else nn.ModuleList([model])

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> Tensor | None:
        return self.engine.runner.grad_norm  # the Trainer reads it when it logs

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a checkpoint of the engine in ``output_dir``; called by ``Trainer``."""
        self.engine.save(Path(output_dir or self.args.output_dir) / _FOLDER)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:  # the optimizer state is in the engine's folder
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.engine.load(Path(resume_from_checkpoint) / _FOLDER)

    def _load_best_model(self) -> None:
        self.engine.load(Path(self.state.best_model_checkpoint) / _FOLDER, weights_only=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(read_torch_file(Path(checkpoint) / "scheduler.pt"))
            # A scheduler expects the rate in the loaded optimizer state, but this one was made after the load.
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate


class _Stepped(torch.optim.Optimizer):
    """The engine's optimizer for the Trainer and its scheduler: the same groups, and a ``step()`` that does nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._of: torch.optim.Optimizer | None = None
        self._own: list[dict[str, Any]] = []
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self._of = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the engine's current groups; loading a checkpoint makes new ones."""
        return self._own if self._of is None else self._of.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._own = groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: ``train_step`` has already stepped."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: accelerate reloads the state that it has just read, which would replace the groups by copies."""
