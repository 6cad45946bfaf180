"""``Booster``: Colossal-AI's way from a model, an optimizer and a plugin to a step."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.colossalai import files
from meshfold.colossalai.arguments import check_names
from meshfold.colossalai.boosted import BoostedModel, BoostedOptimizer
from meshfold.colossalai.context import gpc
from meshfold.colossalai.loaders import shard_loader
from meshfold.colossalai.make_engine import make_engine
from meshfold.colossalai.plugins import Plugin, TorchDDPPlugin
from meshfold.colossalai.settings import Config, Settings
from meshfold.colossalai.submodules import find
from meshfold.colossalai.tables import PRECISIONS
from meshfold.colossalai.training import Criterion, TrainingEngine
from meshfold.mesh import SpecError

_PRECISIONS = {**PRECISIONS, "fp16_apex": "fp16", "fp16_naive": "fp16", "no": "fp32"}


class Booster:
    """Boosts a model, and steps it.

    >>> booster = Booster(plugin=GeminiPlugin(precision="bf16", max_norm=1.0))                        # doctest: +SKIP
    >>> model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, ...)  # doctest: +SKIP
    >>> booster.backward(criterion(model(x), y), optimizer); optimizer.step(); optimizer.zero_grad()  # doctest: +SKIP

    Attributes:
        plugin: defines spec and settings; without one, data parallelism over all ranks.
    """

    def __init__(
        self, device: str | None = None, mixed_precision: str | None = None, plugin: Plugin | None = None
    ) -> None:
        """Args:
            device: of the model; None: this rank's GPU, or the CPU.
            mixed_precision: ``fp16``, ``bf16``, ``fp32``; not with a plugin that sets a precision.
            plugin: one of :mod:`meshfold.colossalai`.

        Raises:
            SpecError: for another precision or plugin, or a precision in two places.
        """
        if plugin is not None and not isinstance(plugin, Plugin):
            raise SpecError(
                f"plugin={plugin!r}: give a plugin of meshfold.colossalai, such as GeminiPlugin(precision='bf16')"
            )
        self.plugin = TorchDDPPlugin() if plugin is None else plugin
        if mixed_precision is not None:
            check_names("Booster: mixed_precision", [mixed_precision], _PRECISIONS)
            if self.plugin.says_precision:
                raise SpecError(
                    f"mixed_precision={mixed_precision!r} with {type(self.plugin).__name__}, which has a precision itself: write "
                    f"{type(self.plugin).__name__}(precision={_PRECISIONS[mixed_precision]!r})"
                )
        self._device, self._precision = device, mixed_precision

    def boost(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[BoostedModel, BoostedOptimizer | None, Any, Any, Any]:
        """Return model, optimizer, criterion, dataloader and scheduler, ready to train under the plugin's spec.

        Args:
            model: whole, or built under ``LazyInitContext``.
            optimizer: made of ``model.parameters()``; None to evaluate.
            criterion: returned unchanged. Under a pipeline it is called with (output, micro-batch), unless the model's
                output has a ``.loss``.
            dataloader: of ``plugin.prepare_dataloader``; or a plain one, of global batches. For a model whose input is not
                token ids, a pipeline reads from it what the model is called with; without one write ``HybridParallelPlugin(...,
                engine=dict(example=batch))``.
            lr_scheduler: of ``optimizer``; the same object is returned, for the engine's optimizer. The script steps it.

        Raises:
            SpecError: for an invalid setting.
        """
        if not isinstance(model, nn.Module):
            raise SpecError(f"boost(model={model!r}): give an nn.Module")
        settings = self._settings(dataloader)
        stages = "pipeline" in settings.parallel
        loss = _Late(criterion) if stages and (criterion is not None or not _has_loss(model)) else None
        engine, schedule = make_engine(
            model,
            optimizer,
            loss,
            lr_scheduler,
            settings,
            type(self.plugin).__name__,
            dataloader,
        )
        gpc.show(Config(parallel=settings.parallel), engine.mesh)
        boosted = BoostedModel(engine)
        steps = None if optimizer is None else BoostedOptimizer(engine)
        return boosted, steps, criterion, shard_loader(dataloader, engine, "train"), schedule

    def backward(self, loss: Tensor, optimizer: BoostedOptimizer) -> None:
        """Add a loss's gradient, a mean over this rank's rows; under several backwards they are summed.

        Raises:
            SpecError: for an optimizer that was not boosted.
        """
        _boosted("backward", optimizer, BoostedOptimizer)
        optimizer.backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: BoostedModel,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        optimizer: BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run forward and backward of the next batch through the stages; after ``model.eval()`` only forward.

        Args:
            data_iter: yields this data coordinate's batches, on every rank of the pipeline.
            model: of :meth:`boost`.
            criterion: of (output, micro-batch); None: that of :meth:`boost`. Unused if the output has a ``.loss``.
            optimizer: unused.
            return_loss: whether to return it.
            return_outputs: whether to return the model's output on this batch, after ``model.eval()``; refused in training.

        Returns:
            ``{"loss": ..., "outputs": ...}``: the loss of the global batch and the output on this data coordinate's, on every rank.

        Raises:
            SpecError: for a model that was not boosted, without a pipeline, or without a loss.
        """
        engine = _boosted("execute_pipeline", model, BoostedModel)
        forward_only = not (engine.training and torch.is_grad_enabled())
        if return_outputs and not forward_only:
            raise SpecError(
                "execute_pipeline(return_outputs=True) in training: outputs of micro-batches are released as soon as their loss "
                "is computed: leave it out, or call model.eval() before"
            )
        if engine.pipeline is None:
            raise SpecError(
                "execute_pipeline without a pipeline: write pp_size=2 in HybridParallelPlugin, or call the model"
            )
        if isinstance(engine.given_criterion, _Late):
            engine.given_criterion.now = criterion or engine.given_criterion.first
            # Checked here, on all ranks: later only the last stage's rank would notice.
            if engine.given_criterion.now is None:
                raise SpecError(
                    f"execute_pipeline: {type(engine.model).__name__} takes no labels to make a loss of: give boost(...) or "
                    "execute_pipeline(...) a criterion of (output, target)"
                )
        batch = next(data_iter)
        _, _, loss = engine.execute_schedule(iter([batch]), forward_only=forward_only, return_output_label=False)
        outputs = engine.predict(batch) if return_outputs else None
        return {"loss": loss if return_loss else None, "outputs": outputs}

    def no_sync(
        self, model: BoostedModel | None = None, optimizer: BoostedOptimizer | None = None
    ) -> AbstractContextManager[None]:
        """Context manager: gradients of backwards inside are reduced by the next one outside."""
        return _boosted("no_sync", model if model is not None else optimizer, BoostedModel, BoostedOptimizer).no_sync()

    def enable_lora(self, model: nn.Module, *args: Any, **given: Any) -> nn.Module:
        """Refuse: LoRA comes from peft here.

        Raises:
            SpecError: always; use peft.
        """
        raise SpecError(
            "booster.enable_lora(model, lora_config=...): write model = peft.get_peft_model(model, lora_config), make the "
            "optimizer of its parameters, then boost"
        )

    # -- files ------------------------------------------------------------------------------------------------------

    def save_model(
        self, model: BoostedModel, checkpoint: str | os.PathLike[str], shard: bool = False, **given: Any
    ) -> None:
        """See :func:`meshfold.colossalai.files.save_model`; all ranks must call."""
        files.save_model(_boosted("save_model", model, BoostedModel), checkpoint, {"shard": shard, **given})

    def load_model(self, model: BoostedModel, checkpoint: str | os.PathLike[str], **given: Any) -> None:
        """See :func:`meshfold.colossalai.files.load_model`; all ranks must call."""
        files.load_model(_boosted("load_model", model, BoostedModel), checkpoint, given)

    def save_optimizer(self, optimizer: BoostedOptimizer, checkpoint: str | os.PathLike[str], **given: Any) -> None:
        """See :func:`meshfold.colossalai.files.save_optimizer`; all ranks must call."""
        files.save_optimizer(_boosted("save_optimizer", optimizer, BoostedOptimizer), checkpoint, given)

    def load_optimizer(self, optimizer: BoostedOptimizer, checkpoint: str | os.PathLike[str], **given: Any) -> None:
        """Resume from a folder of :meth:`save_optimizer`: weights, optimizer, counters, loss scale; all ranks must call."""
        files.load_optimizer(_boosted("load_optimizer", optimizer, BoostedOptimizer), checkpoint, given)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """See :func:`meshfold.colossalai.files.save_lr_scheduler`; all ranks must call."""
        files.save_lr_scheduler(gpc.mesh, lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """See :func:`meshfold.colossalai.files.load_lr_scheduler`."""
        files.load_lr_scheduler(lr_scheduler, checkpoint)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _settings(self, dataloader: Any) -> Settings:
        """Return the plugin's settings with those of this booster."""
        settings = self.plugin.settings(
            rows=getattr(dataloader, "batch_size", None), sampler=getattr(dataloader, "sampler", None)
        )
        engine = dict(settings.engine)
        if self._precision is not None:
            engine["precision"] = _PRECISIONS[self._precision]
        if self._device is not None:
            engine["device"] = self._device
        return Settings(parallel=settings.parallel, engine=engine, words=settings.words)


def _boosted(method: str, given: Any, *kinds: type[BoostedModel] | type[BoostedOptimizer]) -> TrainingEngine:
    """Return the engine of what ``boost`` returned.

    Raises:
        SpecError: for anything else, such as the model that was given to ``boost``.
    """
    if not isinstance(given, kinds):
        wanted = "model" if BoostedModel in kinds else "optimizer"
        raise SpecError(
            f"booster.{method}(...) was given {type(given).__name__}: give the {wanted} that boost(...) returned: "
            "model, optimizer, *_ = booster.boost(model, optimizer)"
        )
    return given.engine


def _has_loss(model: nn.Module) -> bool:
    """Return True if a model computes its loss itself, from labels."""
    return "labels" in inspect.signature(model.forward).parameters


class _Late(Criterion):
    """Loss function that a call of ``execute_pipeline`` may replace.

    Attributes:
        first: the function given to ``boost``.
        now: the function in use.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.first = self.now = function
        super().__init__(self._call)

    def _call(self, output: Any, target: Any) -> Any:
        return None if self.now is None else self.now(output, target)


__path__: list[str] = []  # Colossal-AI's module of this name has submodules


def __getattr__(name: str) -> Any:
    """Return other names of this module in Colossal-AI."""
    from meshfold import colossalai as compat

    return find(name, __name__, compat._HOMES)
