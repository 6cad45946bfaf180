"""The gradients of one optimizer step, from the first forward to where the optimizer takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshfold.engine.checkpoints.saving import Saver
from meshfold.engine.errors import TrainingError
from meshfold.engine.precision import LossScaler
from meshfold.engine.states.replicated import States
from meshfold.engine.states.shown_gradients import ShownGradients

if TYPE_CHECKING:
    from meshfold.zero_gemini import BackwardRole

_ADVICE = (
    "the engine has the gradients. Between engine.backward(loss) and engine.step() torch.nn.utils.clip_grad_norm_ and "
    "clip_grad_value_ work on model.parameters(), and parameter.grad can be multiplied in place; engine.train_step(batch) "
    "clips, steps and lets gradients go by itself: write Engine(..., clip_grad_norm=1.0) or clip_grad_value=... "
    "engine.last.grad_norm is the norm in the last step"
)
_NO_OPTIMIZER = "this engine has no optimizer: give Engine(..., optimizer=dict(name='adamw', lr=...))"


class Accumulation:
    """Forwards and backwards since the last optimizer step.

    Attributes:
        micro_steps: those of ``train_step`` among them.
        backwards: those whose gradients count.
        closed: whether the engine was, so that gradients would come no more.
        summed: whether a backward is the last one, after which gradients are summed over the data axes: no ``no_sync`` is open.
    """

    def __init__(self, states: States, scaler: LossScaler, saver: Saver, *, stages: bool) -> None:
        """Args:
        states: take the gradients.
        scaler: what losses are multiplied with.
        saver: may copy, in the background, what an accumulation changes.
        stages: this rank has one of several stages of a pipeline.
        """
        self._states, self._scaler, self._saver = states, scaler, saver
        self._shown = ShownGradients(states, self._settle, self._are_there, _ADVICE, stages=stages)
        self.micro_steps = self.backwards = 0
        self.summed, self.closed = True, False
        self._begun = False  # a forward whose backward did not come yet
        self._settled = False  # gradients are summed and unscaled
        if states.optimizer is not None:
            self._shown.show()

    def check_open(self) -> None:
        """Raises:
        TrainingError: without an optimizer, or after ``close()``.
        """
        if self._states.optimizer is None:
            raise TrainingError(_NO_OPTIMIZER)
        if self.closed:
            raise TrainingError(
                "this engine is closed, and trains no more: make another Engine, and close it after the last step"
            )

    def begin(self, *, anew: bool = False) -> None:
        """Before a forward whose backward will follow; ``anew``: also if the one before was broken off.

        Raises:
            TrainingError: without an optimizer, or after ``close()``.
        """
        self.check_open()
        if self._settled:
            raise TrainingError(
                "a forward or backward after the gradients were clipped and before step(): gradients are complete once "
                "parameter.grad was used. Clip once, after the last backward of a step; or call zero_grad() before this one"
            )
        self._shown.hide()
        if anew or not self._begun:
            self._begun = True
            self._states.begin(first=not self.backwards)

    def break_off(self) -> None:
        """The forward that has begun failed, and no backward will follow."""
        self._begun = False

    @contextmanager
    def taking(self, kind: BackwardRole, *, shown: bool = True) -> Iterator[None]:
        """Around a backward: what gradients come inside are summed over the data ranks, now or later.

        Args:
            kind: which of a step's backwards it is.
            shown: ``parameter.grad`` shows them afterwards; False where the step comes next.
        """
        self.begin()
        if kind == "final" and self._states.all_read:  # chunks may be stepped with before step() is called
            self._saver.before_change()
        with self._states.backward(kind):
            yield
            self._states.end_backward(kind)
        self._begun = False
        self.backwards += 1
        if shown:
            self._shown.show()

    def backward(
        self, share: Tensor, kind: BackwardRole, *, retain_graph: bool = False, shown: bool = True
    ) -> None:
        """Backward of this rank's share of a loss; ``shown`` as for :meth:`taking`."""
        with self.taking(kind, shown=shown):
            (share * self._scaler.scale).backward(retain_graph=retain_graph)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last: their gradients are not summed over the data axes yet."""
        before, self.summed = self.summed, False
        try:
            yield
        finally:
            self.summed = before

    def finish(self) -> torch.optim.Optimizer:
        """Sum the gradients that were not summed yet, and unscale all; the optimizer that is to step with them.

        Raises:
            TrainingError: without an optimizer, if there was no backward, or if ``parameter.grad`` was assigned.
        """
        optimizer = self._states.optimizer
        if optimizer is None:
            raise TrainingError(_NO_OPTIMIZER)
        if not self.backwards:
            raise TrainingError("step() without a backward() since the last one: there are no gradients")
        self._shown.check_unchanged()
        if self._settled:
            self._shown.hand_back()
        else:
            self._complete()
        return optimizer

    def _are_there(self) -> bool:
        return bool(self.backwards)

    def _settle(self) -> bool:
        """Gradients are summed over the data axes and unscaled from now on, until they are let go; whether there are any."""
        if self.backwards and not self._settled:
            self._complete()
            self._shown.cover()
        return self._settled

    def _complete(self) -> None:
        self._saver.before_change()
        self._shown.hide()
        self._states.finish(1.0 / self._scaler.scale)
        self._settled = True

    def forget(self) -> None:
        """Let the gradients go; the next accumulation begins."""
        self._shown.hide()
        self._states.forget()
        self.backwards = self.micro_steps = 0
        self._settled = False
        if self._states.optimizer is not None and not self.closed:
            self._shown.show()

    def close(self) -> None:
        """No more gradients come: the engine is closed."""
        self.closed = True
        self._shown.hide()
