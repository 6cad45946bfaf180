"""What the twins of dropout define."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class DropoutKernels(Protocol):
    """A twin: a module with this function."""

    def dropout(
        self,
        x: Tensor,
        threshold: int,
        scale: float,
        state: int | Tensor,
        rows: int | Tensor,
        col_offset: int,
        global_cols: int,
    ) -> Tensor:
        """``m c -> m c``: x * scale where the top 24 bits of the element reach ``threshold``, else 0.

        ``state`` is the stream's (an int64), ``rows`` the number of the first row or an int64 tensor ``m``.
        """
