"""What the twins of the merge of partial attention define."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AttentionKernels(Protocol):
    """A twin: a module with this function."""

    def merge(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge part ``b s heads d`` with its part_lse ``b heads s`` into out and lse of the same shapes, in place.

        out and lse are float32 or float64, part may be narrower; any strides anywhere.
        """
