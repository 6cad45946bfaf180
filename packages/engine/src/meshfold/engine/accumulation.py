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
from meshfold.engine.states import States

if TYPE_CHECKING:
    from meshfold.zero_gemini.backward import Backward

_NO_OPTIMIZER = "this engine has no optimizer: give Engine(..., optimizer=dict(name='adamw', lr=...))"


class Accumulation:
    """Forwards and backwards since the last optimizer step.

    Attributes:
        place: micro-steps of ``train_step`` among them.
        backwards: those whose gradients count.
        closed: whether the engine was, so that gradients would come no more.
        summed: whether a backward is the last one, after which gradients are summed over the data axes: no ``no_sync`` is open.
    """

    def __init__(self, states: States, scaler: LossScaler, saver: Saver) -> None:
        """Args:
        states: take the gradients.
        scaler: what losses are multiplied with.
        saver: may copy, in the background, what an accumulation changes.
        """
        self._states, self._scaler, self._saver = states, scaler, saver
        self.place = self.backwards = 0
        self.summed, self.closed = True, False
        self._begun = False  # a forward whose backward did not come yet

    def begin(self, *, anew: bool = False) -> None:
        """Before a forward whose backward will follow; ``anew``: also if the one before was broken off.

        Raises:
            TrainingError: without an optimizer, or after ``close()``.
        """
        if self._states.optimizer is None:
            raise TrainingError(_NO_OPTIMIZER)
        if self.closed:
            raise TrainingError(
                "this engine is closed, and trains no more: make another Engine, and close it after the last step"
            )
        if anew or not self._begun:
            self._begun = True
            self._states.begin(first=not self.backwards)

    def break_off(self) -> None:
        """The forward that has begun failed, and no backward will follow."""
        self._begun = False

    @contextmanager
    def taking(self, kind: Backward) -> Iterator[None]:
        """Around a backward: what gradients come inside are summed over the data ranks, now or later."""
        self.begin()
        if kind == "final" and self._states.all_read:  # chunks may be stepped with before step() is called
            self._saver.before_change()
        with self._states.backward(kind):
            yield
            self._states.end_backward(kind)
        self._begun = False
        self.backwards += 1

    def backward(self, share: Tensor, kind: Backward, *, retain_graph: bool = False) -> None:
        """Backward of this rank's share of a loss."""
        with self.taking(kind):
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
            TrainingError: without an optimizer, or if there was no backward.
        """
        optimizer = self._states.optimizer
        if optimizer is None:
            raise TrainingError(_NO_OPTIMIZER)
        if not self.backwards:
            raise TrainingError("step() without a backward() since the last one: there are no gradients")
        self._saver.before_change()
        self._states.finish(1.0 / self._scaler.scale)
        return optimizer

    def forget(self) -> None:
        """Let the gradients go; the next accumulation begins."""
        self._states.forget()
        self.backwards = self.place = 0
