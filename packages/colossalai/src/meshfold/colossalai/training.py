"""An engine for loops written for Colossal-AI."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.batches import FallbackLoss
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import eval_mode
from meshfold.mesh.watchdog import report_errors


class Criterion:
    """A loss function in the script's form and in the engine's.

    ``criterion(output, target)`` for batches ``(input, target)``; ``criterion(output, batch)`` for all others, as for a
    pipeline's micro-batches in Colossal-AI. Models whose output has a ``.loss`` need none.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        """Args:
            function: or a module without trained parameters.

        Raises:
            SpecError: for anything that cannot be called, or has trained parameters.
        """
        if not callable(function):
            raise SpecError(f"criterion={function!r}: give a function of the model's output and the target")
        if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
            raise SpecError(
                f"criterion={type(function).__name__}(...) has trained parameters, which no optimizer step would reach here: "
                "make it a part of the model, whose output then has a .loss"
            )
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the loss as the script does."""
        return self.function(*args, **kwargs)

    def of_batch(self, output: Any, batch: Any) -> Tensor:
        """Call the loss as the engine's ``loss_fn``."""
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return self._of_target(output, batch[1])
        return self.function(output, batch)

    def _of_target(self, output: Any, target: Any) -> Tensor:
        if isinstance(target, Mapping):
            return self.function(output, **target)
        if isinstance(target, tuple | list):
            return self.function(output, *target)
        return self.function(output, target)


class TrainingEngine(Engine):
    """An :class:`meshfold.engine.Engine` with the methods of Colossal-AI's.

    >>> for image, label in train_dataloader:          # doctest: +SKIP
    ...     engine.zero_grad()
    ...     output = engine(image)
    ...     loss = engine.criterion(output, label)
    ...     engine.backward(loss)
    ...     engine.step()
    ...     lr_scheduler.step()

    With ``gradient_accumulation=n`` the loop is the same: a loss is weighted 1/n, and the last of n calls of :meth:`step`
    steps. The script steps the schedule itself, as in Colossal-AI.

    Attributes:
        given_criterion: the script's loss function; None if there is none.
        training: whether a call computes gradients.
    """

    def __init__(self, model: nn.Module, *, criterion: Callable[..., Tensor] | None, **settings: Any) -> None:
        """Args:
        model: whole.
        criterion: of (output, target); None for models whose output has a ``.loss``.
        settings: of :class:`meshfold.engine.Engine`.
        """
        self.given_criterion = (
            criterion if criterion is None or isinstance(criterion, Criterion) else Criterion(criterion)
        )
        if self.given_criterion is not None:
            settings["loss_fn"] = FallbackLoss(self.given_criterion.of_batch)
        super().__init__(model, **settings)
        self.runner.steps_scheduler = False  # the script steps it
        self.runner.forward.rows.trust()  # examples of Colossal-AI give all ranks the same rows
        self.training = True
        self._calls = 0  # calls of ``step`` since the last optimizer step

    @property
    def criterion(self) -> Criterion:
        """The script's loss function.

        Raises:
            SpecError: if none was given.
        """
        if self.given_criterion is None:
            raise SpecError("this engine has no criterion: give one, or use the loss in the model's output")
        return self.given_criterion

    @property
    def uses_pipeline(self) -> bool:
        """True if the model is in stages: :meth:`execute_schedule` then replaces forward and backward."""
        return self.pipeline is not None

    def train(self, mode: bool = True) -> TrainingEngine:
        """Switch to training mode, with dropout and gradients."""
        self.training = mode
        self.model.train(mode)
        return self

    def eval(self) -> TrainingEngine:
        """Switch to evaluation mode, without dropout and gradients."""
        return self.train(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, whole on every rank; after :meth:`eval` without gradients."""
        if self.training and torch.is_grad_enabled() and self.optimizer is not None:
            return super().__call__(*args, **kwargs)
        work = self.runner.forward.inputs(args, kwargs)
        runs: Any = self.model if self.pipeline is None else self.pipeline
        with eval_mode(self.model), torch.no_grad():
            return runs(*work.args, **work.kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add a loss's gradient, weighted 1/n with ``gradient_accumulation=n``."""
        with self._waits():
            super().backward(loss / self.runner.accumulation, retain_graph=retain_graph)

    def step(self) -> bool:
        """Clip, and step the optimizer; with ``gradient_accumulation=n`` at each n-th call.

        Returns:
            Whether the optimizer stepped.
        """
        if self._calls + 1 < self.runner.accumulation:
            self._calls += 1
            return False
        self._calls = 0
        return self._noted(super().step())

    def _noted(self, stepped: bool) -> bool:
        """Report a step to torch's schedulers, since our kernels step without the optimizer's method."""
        if stepped and self.optimizer is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return stepped

    def zero_grad(self) -> None:
        """Release the gradients, except in the middle of an accumulation."""
        if not self._calls:
            super().zero_grad()

    def train_step(self, batch: Any) -> float:
        """See :meth:`meshfold.engine.Engine.train_step`."""
        loss = super().train_step(batch)
        if self.last is not None and self.last.stepped:
            self._calls = 0
            self._noted(not self.last.skipped)
        return loss

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Tensor | None]:
        """Run forward, loss and backward of the next batch, with or without a pipeline; then call :meth:`step`.

        Args:
            data_iter: yields this data coordinate's batches, ``(input, label)`` if there is a criterion.
            forward_only: no backward, no dropout.
            return_loss: whether to return the loss: of this rank's rows; under a pipeline of the global batch.
            return_output_label: whether to return output and label; under a pipeline they are None.

        Returns:
            Output, label and loss.
        """
        batch = next(data_iter)
        output = label = None
        if self.pipeline is not None:
            loss = self._through(batch, forward_only=forward_only)
        else:
            output, label, loss = self._forward_of(batch, forward_only=forward_only)
        if not return_output_label:
            output = label = None
        return output, label, loss if return_loss else None

    def _through(self, batch: Any, *, forward_only: bool) -> Tensor:
        """Run a batch through the stages without an optimizer step."""
        loss = self.eval_step(batch) if forward_only else self._run(batch)
        return torch.tensor(loss, dtype=torch.float64, device=self.device)

    @report_errors
    def _run(self, batch: Any) -> float:
        """Run a micro-step without an optimizer step, and return its loss."""
        self.runner.run(batch, steps=False)
        return math.nan if self.last is None else self.last.loss

    def _forward_of(self, batch: Any, *, forward_only: bool) -> tuple[Any, Any, Tensor]:
        work = self.runner.forward.prepare(batch)
        label = work.given[1] if isinstance(work.given, tuple | list) else None
        was, self.training = self.training, not forward_only
        try:
            output = self(*work.args, **work.kwargs)
        finally:
            self.training = was
        loss = self.runner.forward.loss_of(output, work)
        if not forward_only:
            self.backward(loss)
        return output, label, loss.detach()

    def _waits(self) -> AbstractContextManager[object]:
        """Return ``no_sync()`` for all but an accumulation's last backward, unless ZeRO shards the gradients."""
        zero = self.spec.zero
        more = self._calls + 1 < self.runner.accumulation
        return self.no_sync() if more and (zero is None or zero.stage == 1) else nullcontext()
