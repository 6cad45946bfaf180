"""Gradients of one optimizer step, from the first forward to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from meshfold.engine.batches.shown import explain_failure
from meshfold.engine.errors import TrainingError
from meshfold.engine.precision import LossScaler
from meshfold.engine.states.protocols import States
from meshfold.engine.states.shown_gradients import ShownGradients

if TYPE_CHECKING:
    from meshfold.zero_gemini import BackwardRole


_ADVICE = (
    "the engine has the gradients. Between engine.backward(loss) and engine.step() torch.nn.utils.clip_grad_norm_ and "
    "clip_grad_value_ work on model.parameters(), and parameter.grad can be multiplied in place; engine.train_step(batch) "
    "clips, steps and releases gradients itself: write Engine(..., clip_grad_norm=1.0) or clip_grad_value=... "
    "engine.last.grad_norm is the norm in the last step"
)
_NO_OPTIMIZER = "this engine has no optimizer: give Engine(..., optimizer=dict(name='adamw', lr=...))"


class CastWeights(Protocol):
    """Protocol of weights in another format, made once a step: :class:`meshfold.engine.model.fp8_weights.Fp8Weights`."""

    def open(self) -> None:
        """Keep casts made from now on."""

    def close(self) -> None:
        """Release the casts: weights change."""


class Accumulation:
    """Forwards and backwards since the last optimizer step.

    Attributes:
        scaler: of the losses.
        micro_steps: how many of them ``train_step`` made.
        backwards: those whose gradients count.
        settled: gradients are summed over the data axes and unscaled, until they are released.
        closed: whether the engine is closed, so that no more gradients arrive.
        summed: whether gradients are summed over the data axes after this backward: no ``no_sync`` is open.
    """

    def __init__(
        self,
        states: States,
        scaler: LossScaler,
        *,
        before_change: Callable[[], None] = lambda: None,
        stages: bool = False,
        advice: str = _ADVICE,
        shows_none: bool = True,
        weights: CastWeights | None = None,
    ) -> None:
        """Args:
        states: take the gradients.
        scaler: of the losses.
        before_change: called before chunks may be stepped with, and before gradients are summed.
        stages: this rank has one of several stages of a pipeline.
        advice: what to do with gradients instead, for messages.
        shows_none: ``parameter.grad`` is a stand-in also while there are no gradients, so that a use of it raises.
        weights: cast once for all forwards and backwards of a step; None if none are.
        """
        self._states, self.scaler, self._before_change = states, scaler, before_change
        self._shown = ShownGradients(states, self.settle, self._are_there, advice, stages=stages)
        self._weights = weights
        self._shows_none = shows_none and states.optimizer is not None
        self.micro_steps = self.backwards = 0
        self.summed, self.closed, self.settled = True, False, False
        self._begun = False  # a forward waits for its backward
        if self._shows_none:
            self._shown.show()

    def check_graph(self) -> None:
        """Raise a TrainingError where torch keeps no graph for a backward."""
        if not torch.is_grad_enabled():
            raise TrainingError(
                "train_step inside torch.no_grad() or torch.inference_mode(), where there are no gradients: call it outside, or "
                "call eval_step(batch) for the loss alone"
            )

    def check_open(self) -> None:
        """Check that the engine can train.

        Raises:
            TrainingError: without an optimizer, or after ``close()``.
        """
        if self._states.optimizer is None:
            raise TrainingError(_NO_OPTIMIZER)
        if self.closed:
            raise TrainingError(
                "this engine is closed, and trains no more: make another Engine, and close it after the last step"
            )

    def begin(self, *, anew: bool = False) -> None:
        """Start a forward whose backward will follow; ``anew``: begin even if the one before was aborted.

        Raises:
            TrainingError: without an optimizer, or after ``close()``.
        """
        self.check_open()
        if self.settled:
            raise TrainingError(
                "a forward or backward after the gradients were clipped and before step(): gradients are complete once "
                "parameter.grad was used. Clip once, after the last backward of a step, or call zero_grad() first"
            )
        self._shown.hide()
        if anew or not self._begun:
            self._begun = True
            if self._weights is not None and not self.backwards:
                self._weights.open()
            self._states.begin(first=not self.backwards)

    def break_off(self) -> None:
        """Record that the forward failed, and no backward will follow."""
        self._begun = False

    @contextmanager
    def taking(self, kind: BackwardRole, *, shown: bool = True, made_by_all: bool = True) -> Iterator[None]:
        """Context manager of a backward: gradients that arrive inside are summed over the data ranks, now or later.

        Args:
            kind: which of a step's backwards it is.
            shown: ``parameter.grad`` shows them afterwards; False where the step comes next.
            made_by_all: it reaches these parameters on some rank; a parameter that it does not reach has a zero gradient.
        """
        self.begin()
        if kind == "final" and self._states.all_read:  # chunks may be stepped before step() is called
            self._before_change()
        with self._states.backward(kind):
            yield
            if made_by_all:
                self._states.end_backward(kind)
        self._begun = False
        self.backwards += 1
        if shown:
            self._shown.show()

    def backward(self, share: Tensor, kind: BackwardRole, *, retain_graph: bool = False, shown: bool = True) -> None:
        """Backward of this rank's share of a loss; ``shown`` as for :meth:`taking`."""
        with self.taking(kind, shown=shown):
            try:
                (share * self.scaler.scale).backward(retain_graph=retain_graph)
            except RuntimeError as error:
                explain_failure(error, self._states)
                raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: backwards inside are not the last, so their gradients are not summed over the data axes yet."""
        before, self.summed = self.summed, False
        try:
            yield
        finally:
            self.summed = before

    def finish(self) -> torch.optim.Optimizer:
        """Sum the gradients that were not summed yet, and unscale all; return the optimizer to step.

        Raises:
            TrainingError: without an optimizer, if there was no backward, or if ``parameter.grad`` was assigned.
        """
        optimizer = self._states.optimizer
        if optimizer is None:
            raise TrainingError(_NO_OPTIMIZER)
        if not self.backwards:
            raise TrainingError(
                "step() without a backward() since the last step: there are no gradients. Call engine.backward(loss) in place of "
                "loss.backward()"
            )
        self._shown.check_unchanged()
        if self._weights is not None:
            self._weights.close()
        if self.settled:
            self._shown.hand_back()
        else:
            self._complete()
        return optimizer

    def complete(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which gradients are summed, unscaled and where the states expect them; ``what``: for, in errors."""
        return self._shown.complete(what)

    def _are_there(self) -> bool:
        return bool(self.backwards)

    def settle(self) -> bool:
        """Sum the gradients over the data axes and unscale them, until they are released; return whether there are any."""
        if self.backwards and not self.settled:
            self._complete()
            self._shown.cover()
        return self.settled

    def _complete(self) -> None:
        self._before_change()
        self._shown.hide()
        self._states.finish(1.0 / self.scaler.scale)
        self.settled = True

    def forget(self) -> None:
        """Release the gradients; the next accumulation begins."""
        self._shown.hide()
        self._states.forget()
        self.backwards = self.micro_steps = 0
        self._begun, self.settled = self._begun and not self.settled, False
        if self._weights is not None and not self._begun:  # else a backward may recompute with them
            self._weights.close()
        if self._shows_none and not self.closed:
            self._shown.show()

    def close(self) -> None:
        """Close: no more gradients arrive."""
        self.closed = True
        self._shown.hide()
