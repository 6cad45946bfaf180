"""An optimizer steps when its owner says so, and never by hand.

Gradients wait where they are summed over the ranks, and the optimizer is given them right before it steps. Called by hand,
``optimizer.step()`` would find none and do nothing, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshfold.engine.errors import TrainingError


class StepGuard:
    """Stands before an optimizer's ``step()``, until it is closed."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, advice: str) -> None:
        """Args:
        optimizer: None for evaluation only, where nothing is guarded.
        advice: what was wrong and what to call, after the name of the method.
        """
        self._advice, self._open = advice, False
        self._handle = None if optimizer is None else optimizer.register_step_pre_hook(self._before)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, the owner steps."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def close(self) -> None:
        """Let the optimizer go; may be called twice."""
        if self._handle is not None:
            self._handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *called: Any) -> None:
        """Raises:
        TrainingError: for a step that is not the owner's.
        """
        if not self._open:
            raise TrainingError(f"{type(optimizer).__name__}.step() {self._advice}")
