"""State of a batch between generated tokens: each token is recorded on the device, and is what the next one begins with."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_ROWS = 1024


class TokenState(NamedTuple):
    """The state of a batch of running sequences between tokens, contiguous, on one device.

    Attributes:
        ids: int64 ``b``, the newest token of each row.
        positions: int64 ``b``, its place in its sequence.
        going: int64 ``b``, 1 for a row with a sequence, else 0.
        step: int64 ``1``, tokens that were recorded.
        tokens: int64 ``most b``, all of them.
        logprobs: float64 ``most b``.
    """

    ids: Tensor
    positions: Tensor
    going: Tensor
    step: Tensor
    tokens: Tensor
    logprobs: Tensor

    def record(self, tokens: Tensor, logprobs: Tensor, last: int) -> None:
        """Record a token of each row; the next step begins with them.

        Args:
            tokens: int64 ``b``.
            logprobs: ``b``, any floating dtype.
            last: the last position that the model and the pages have. A sequence that ends there may run on, and is dropped.
        """
        if tokens.is_cuda and tokens.shape[0] <= _MOST_ROWS and find_spec("triton") is not None:
            from meshfold.kernels.token_state_triton import launch_record  # which needs Triton

            launch_record(tokens, logprobs, self, last)
            return
        self.tokens.index_copy_(0, self.step, tokens.unsqueeze(0))
        self.logprobs.index_copy_(0, self.step, logprobs.double().unsqueeze(0))
        self.ids.copy_(tokens)
        self.positions.add_(self.going).clamp_(max=last)
        self.step.add_(1)


def table_rows(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Return the rows of a part of a table, ``n -> n h``, without gradients; zeros for ids that other parts have.

    Args:
        ids: int64 ``n``.
        table: ``v h``, contiguous, of the ids from ``first`` on.
        first: the id of its first row.
    """
    if ids.is_cuda and find_spec("triton") is not None:
        from meshfold.kernels.token_state_triton import launch_rows  # which needs Triton

        return launch_rows(ids, table, first)
    local = ids - first
    here = (local >= 0) & (local < table.shape[0])
    return torch.where(here.unsqueeze(1), table[torch.where(here, local, 0)], 0.0)
