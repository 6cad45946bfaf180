"""What one call of ``train_step`` did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshfold.engine.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Numbers that are the same on every rank.

    Attributes:
        step: optimizer steps so far, skipped ones left out.
        micro_step: calls of ``train_step`` so far.
        loss: mean over the tokens of the global batch.
        tokens: targets in the global batch that counted.
        stepped: whether this call ended an accumulation, so that the rest says something new.
        grad_norm: norm of the whole model's gradient before clipping; None until the first accumulation ended.
        lr: learning rate of the first parameter group at the last optimizer step.
        loss_scale: what the loss is multiplied with (1 save in fp16).
        skipped: whether the last accumulation was thrown away because of an overflow.
        skipped_steps: how many were, so far.
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


def metrics_of(engine: Engine, loss: float, tokens: int, *, stepped: bool) -> StepMetrics:
    """What an engine's call did, as it stands: its loss and tokens are told, all else is known."""
    return StepMetrics(
        step=engine.steps,
        micro_step=engine.micro_step,
        loss=loss,
        tokens=tokens,
        stepped=stepped,
        grad_norm=None if engine._norm is None else float(engine._norm),
        lr=engine._lr,
        loss_scale=engine._scaler.scale,
        skipped=engine._skipped,
        skipped_steps=engine.skipped_steps,
    )
