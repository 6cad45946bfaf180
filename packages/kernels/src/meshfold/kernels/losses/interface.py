"""What the twins of the losses define, on logits ``m v`` whose columns lie side by side in memory.

``valid`` is the number of columns that are words, ``start`` the global number of the first; statistics are float32
(float64 for float64).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LossKernels(Protocol):
    """A twin: a module with these functions."""

    def local_max(self, logits: Tensor, valid: int) -> Tensor:
        """``m v -> m``: -inf where there is no valid column."""

    def sums(
        self, logits: Tensor, row_max: Tensor | None, labels: Tensor, start: int, valid: int, logit_sum: bool
    ) -> tuple[Tensor, Tensor]:
        """``m v, m, m -> m, (2 or 3) m``: the maximum (found, if not given) and the sums about it."""

    def gradient(
        self,
        logits: Tensor,
        row_max: Tensor,
        sum_exp: Tensor,
        labels: Tensor,
        start: int,
        valid: int,
        grad: Tensor,
        label_smoothing: float,
        z_loss: float,
        vocab_size: int,
        out: Tensor,
    ) -> None:
        """Writes dlogits ``m v`` into ``out``, which may be ``logits`` itself."""
