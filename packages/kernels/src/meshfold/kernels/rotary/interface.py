"""What the twins of the rotary embedding define."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RotaryKernels(Protocol):
    """A twin: a module with this function."""

    def rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, inverse: bool
    ) -> None:
        """Turn q ``b s heads d`` and k ``b s kv_heads d`` by cos, sin ``b s r`` into q_out and k_out.

        ``inverse`` turns back. The outputs may be q and k themselves; any strides anywhere.
        """
