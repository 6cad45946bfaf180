"""What the twins of the activations define. ``m`` rows, ``f`` or ``n`` columns that lie side by side in memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ActivationKernels(Protocol):
    """A twin: a module with these functions."""

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """``m f, m f -> m f``: silu(gate) * up."""

    def gated_gradients(self, dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
        """Writes dgate and dup, each ``m f``, into the tensors given."""

    def gelu(self, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        """``m n, n -> m n``: gelu(x + bias)."""

    def gelu_gradients(
        self, dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool
    ) -> tuple[Tensor, Tensor | None]:
        """dx ``m n`` and, with a bias, its gradient ``n`` in float32 (float64)."""
