"""What the twins of the norms define.

One set of functions serves RMSNorm and LayerNorm: RMSNorm is LayerNorm whose mean is taken as zero (``mean=None``).
``m`` rows of ``h`` columns; statistics are float32 (float64 for float64 rows), so are sums and weight gradients.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class NormKernels(Protocol):
    """A twin: a module with these functions, on rows with neighbouring columns side by side."""

    def row_sums(self, x: Tensor, mean: Tensor | None, square: bool) -> Tensor:
        """``m h -> m``: sum of x, or of (x - mean)**2 when ``square``."""

    def normalise(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor
    ) -> Tensor:
        """``m h, h, h, m, m -> m h``: (x - mean) * rstd * weight + bias."""

    def gradient_sums(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor
    ) -> Tensor:
        """``m h -> 2 m`` (sum of dy*w, sum of dy*w*xhat), or ``1 m`` (the second alone) when ``mean`` is None."""

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        sums: Tensor | None,
        hidden: int,
        added: Tensor | None,
        with_bias: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dx (plus ``added``), dweight, dbias. ``sums`` None: these rows are whole, so they are found on the way.

        The dtype of dx is that of x; dweight is None without a weight, dbias without ``with_bias``.
        """

    def whole(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Statistics and result of whole rows at once: y in the dtype of x, x + residual (or x), mean, rstd."""
