"""What a token sees: itself and those before it, of its own document, within a window.

Documents packed into a row are told by positions that begin anew, as transformers tells them: 0 1 2 0 1 2 3 are two of
3 and 4 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshfold.mesh import SpecError
from meshfold.mesh.targets import IGNORE


def check_positions(position_ids: Tensor | None, input_ids: Tensor) -> None:
    """Raise a SpecError for positions that are not ``b s`` or ``1 s`` integers for ids ``b s``."""
    if position_ids is None:
        return
    rows, length = input_ids.shape
    shape = tuple(position_ids.shape)
    if shape not in ((rows, length), (1, length)) or position_ids.is_floating_point():
        raise SpecError(
            f"position_ids {list(shape)} of {position_ids.dtype} for tokens {[rows, length]}: give integers, one a token, of every "
            "row or of one row for all"
        )


def first_tokens(position_ids: Tensor) -> Tensor:
    """``b s`` positions -> ``b s`` bool: where a document begins, the first of the row left out."""
    first = torch.zeros_like(position_ids, dtype=torch.bool)
    first[:, 1:] = position_ids.diff(dim=1) != 1
    return first


def without_first_tokens(labels: Tensor, position_ids: Tensor) -> Tensor:
    """Labels ``b s``, not shifted, that leave out each document's first token: none before it should predict it."""
    return labels.masked_fill(first_tokens(position_ids), IGNORE)


class CausalMask(nn.Module):
    """Masks for attention over whole rows: ``s s``, or ``b 1 s s`` with positions; what is added to the scores.

    To whoever shards a model it makes two promises. ``attended_rows = True``: of the positions it is given, the rows that
    attention has are enough, and should be all. ``makes_masks = False`` lets it make none: for who splits sequences, and keeps
    attention to documents and to ``window`` in another way.
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
            document = first_tokens(position_ids).cumsum(1)
            seen = (seen & (document[:, :, None] == document[:, None, :])).unsqueeze(1)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(~seen, -torch.inf)

    def extra_repr(self) -> str:
        return f"window={self.window}"
