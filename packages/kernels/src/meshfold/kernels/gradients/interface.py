"""What the twins of the gradient pass define. Everything is flat and contiguous and checked before."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

SQUARES, MAGNITUDES, LARGEST = 2, 1, 0  # which partial norm
LANES = 1024  # elements that are accumulated side by side


class GradientKernels(Protocol):
    """A twin: a module with these functions. ``start`` is the global number of the first element."""

    def partials(self, x: Tensor, norm: int, block: int, start: int) -> Tensor:
        """``n -> blocks`` float64: the partial norm of each global block of ``block`` elements that x touches."""

    def write(self, source: Tensor, out: Tensor, add: bool) -> None:
        """Writes ``source``, in the dtype of ``out``, or adds it to what is there: in float32 at least, rounded once."""
