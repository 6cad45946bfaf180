"""Positions of (token, expert) pairs in rows sorted by expert or by rank, by counting: no sort, no answer from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Rows in the order of their bins (experts or ranks), and in a bin in the order of the tokens.

    Attributes:
        places: [n, j] int64: the row of each pair, -1 for pairs that have none.
        pairs: [m] int64: the pair t·j + i of each row. Rows after the last pair have pair 0.
        counts: [bins] int64: rows of each bin.
    """

    places: Tensor
    pairs: Tensor
    counts: Tensor

    @property
    def ends(self) -> Tensor:
        """[bins] int32: the row after the last of each bin."""
        return self.counts.cumsum(0, dtype=torch.int32)


def by_expert(index: Tensor, experts: int, rows: int) -> Places:
    """Give a row to every pair of a token with an expert.

    Args:
        index: [n, k] whole numbers: experts; numbers outside of 0 to experts - 1 have no row.
        experts: the number of bins.
        rows: m: of the result, no fewer than there are pairs.
    """
    places, counts = expert_places(index, experts)
    return Places(places=places, pairs=pairs_of(places, rows), counts=counts)


def expert_places(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return places [n, k] and counts [experts] of :class:`Places`, bins being experts."""
    tokens = index.shape[0]
    valid = (index >= 0) & (index < experts)
    bins = torch.where(valid, index, experts).long()
    ones = torch.ones_like(bins)
    chosen = torch.zeros(experts + 1, tokens, dtype=torch.int64, device=index.device).scatter_add_(
        0, bins.t(), ones.t()
    )
    before, counts = _before(chosen[:experts])
    before = torch.cat([before, before.new_zeros(1, tokens)])
    # A token that names an expert twice gets two rows, one after the other.
    repeats = (bins.unsqueeze(2) == bins.unsqueeze(1)).tril(-1).sum(2)
    return torch.where(valid, before.gather(0, bins.t()).t() + repeats, -1), counts


def rank_places(index: Tensor, experts_each: int, ranks: int, sharing: int = 1) -> tuple[Tensor, Tensor]:
    """Give one row to every rank that works on a token, however many of the token's experts it has.

    Args:
        index: [n, k] whole numbers; rank r has the experts from r // sharing · experts_each on; numbers outside have no rank.
        sharing: how many neighbouring ranks have parts of the same experts: a token goes to all of them.

    Returns:
        places [n, ranks] and counts [ranks], as in :class:`Places`.
    """
    tokens = index.shape[0]
    blocks = ranks // sharing
    valid = (index >= 0) & (index < experts_each * blocks)
    owner = torch.where(valid, index // experts_each, blocks).long()
    chosen = torch.zeros(blocks + 1, tokens, dtype=torch.int64, device=index.device)
    chosen = chosen.scatter_(0, owner.t(), 1)[:blocks]
    if sharing > 1:
        chosen = chosen.repeat_interleave(sharing, 0)
    before, counts = _before(chosen)
    return torch.where(chosen == 1, before, -1).t().contiguous(), counts


def _before(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many rows are in front of each (bin, token), and the rows of each bin: ``b n -> b n, b``."""
    upto = chosen.cumsum(1)
    counts = chosen.sum(1)
    starts = counts.cumsum(0) - counts
    return upto - chosen + starts.unsqueeze(1), counts


def pairs_of(places: Tensor, rows: int) -> Tensor:
    """Return the pairs [rows] of places [n, j]: the inverse."""
    flat = places.flatten()
    numbers = torch.arange(flat.numel(), device=places.device)
    # Pairs without a row are written to an extra row, which is cut off.
    target = torch.where(flat < 0, rows, flat)
    return torch.zeros(rows + 1, dtype=torch.int64, device=places.device).scatter_(0, target, numbers)[:rows]
