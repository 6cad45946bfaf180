"""Metrics of a step, which stay on the device until somebody reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Metrics of one call of ``train_step``, the same on every rank.

    Attributes:
        step: optimizer steps so far, without skipped ones.
        micro_step: calls of ``train_step`` so far.
        loss: mean over the tokens of the global batch.
        tokens: targets in the global batch that counted.
        stepped: True if this call ended an accumulation; the following attributes are of the last one that ended.
        grad_norm: norm of the whole model's gradient before clipping; None before the end of the first accumulation.
        lr: learning rate of the first parameter group at the last optimizer step.
        loss_scale: factor of the loss (1 except under fp16).
        skipped: True if the last accumulation was discarded, because of an overflow or by ``nonfinite="skip"``.
        skipped_steps: number of discarded accumulations so far.
    """

    step: int
    micro_step: int
    loss: float
    tokens: int
    stepped: bool
    grad_norm: float | None
    lr: float
    loss_scale: float
    skipped: bool
    skipped_steps: int


class StepValues:
    """Values of a step, some of them still on the device."""

    def __init__(
        self, loss: Tensor | None, tokens: Tensor | None, grad_norm: Tensor | None, known: Mapping[str, Any]
    ) -> None:
        """Args:
        loss, tokens, grad_norm: scalar tensors, or None.
        known: the other fields of :class:`StepMetrics`.
        """
        self._loss, self._tokens, self._grad_norm, self._known = loss, tokens, grad_norm, known

    @property
    def mean_loss(self) -> Tensor:
        """The loss on the device; nan if no token counts."""
        if self._loss is None or self._tokens is None:
            return torch.full((), math.nan, dtype=torch.float64)
        return torch.where(self._tokens > 0, self._loss, math.nan)

    @cached_property
    def metrics(self) -> StepMetrics:
        """Metrics as Python numbers. The host waits for the device the first time."""
        tokens = 0 if self._tokens is None else int(self._tokens)
        return StepMetrics(
            loss=float(self._loss) if self._loss is not None and tokens else math.nan,
            tokens=tokens,
            grad_norm=None if self._grad_norm is None else float(self._grad_norm),
            **self._known,
        )
