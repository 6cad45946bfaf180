"""Causal masks: a token sees itself and earlier tokens of its own document, within a window."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshfold.mesh.model_io import document_starts


class CausalMask(nn.Module):
    """Masks for attention over whole rows: ``s s``, or ``b 1 s s`` with positions; what is added to the scores.

    Two attributes tell code that shards a model: ``attended_rows = True``, to give it the positions of exactly the rows that
    attention has; ``makes_masks``, that can be set to False where sequences are sharded, and documents and ``window`` are kept
    in another way.
    """

    attended_rows = True
    makes_masks = True

    def __init__(self, window: int | None) -> None:
        """Args:
        window: a token sees itself and ``window - 1`` before; None: all before.
        """
        super().__init__()
        self.window = window

    def forward(self, position_ids: Tensor | None, like: Tensor, length: int) -> Tensor | None:
        """One mask for all layers; None where a token sees all before it, or is alone.

        Args:
            position_ids: ``b s`` or ``1 s``, begin anew at each document; None: each row is one.
            like: the residual stream; says dtype and device.
            length: s, tokens of a row.
        """
        window = None if self.window is None or self.window >= length else self.window
        if not self.makes_masks or length == 1 or (window is None and position_ids is None):
            return None
        token = torch.arange(length, device=like.device)
        back = token[:, None] - token
        seen = back >= 0
        if window is not None:
            seen = seen & (back < window)
        if position_ids is not None:
            document = document_starts(position_ids).cumsum(1)
            seen = (seen & (document[:, :, None] == document[:, None, :])).unsqueeze(1)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(~seen, -torch.inf)

    def extra_repr(self) -> str:
        return f"window={self.window}"
