"""Positions of (token, rank) pairs in rows sorted by rank, by counting: no sort, no answer from the device."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels import running_counts


def rank_places(index: Tensor, experts_each: int, ranks: int, sharing: int = 1) -> tuple[Tensor, Tensor]:
    """Give one row to every rank that has any of a token's experts.

    Args:
        index: [n, k] whole numbers; rank r has the experts from r // sharing · experts_each on; numbers outside have no rank.
        sharing: how many neighbouring ranks have parts of the same experts: a token goes to all of them.

    Returns:
        places [n, ranks]: the row of each pair of a token with a rank, -1 for pairs that have none; counts [ranks] int64.
    """
    tokens = index.shape[0]
    blocks = ranks // sharing
    valid = (index >= 0) & (index < experts_each * blocks)
    owner = torch.where(valid, index // experts_each, blocks).long()
    chosen = torch.zeros(blocks + 1, tokens, dtype=torch.int32, device=index.device)
    chosen = chosen.scatter_(0, owner.t(), 1)[:blocks]
    if sharing > 1:
        chosen = chosen.repeat_interleave(sharing, 0)
    before, counts = _before(chosen)
    return torch.where(chosen == 1, before, -1).t().contiguous(), counts


def _before(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of rows before each (bin, token), and of each bin: ``b n -> b n, b``."""
    counts = chosen.sum(1)
    starts = counts.cumsum(0) - counts
    return running_counts(chosen) - chosen + starts.unsqueeze(1), counts
