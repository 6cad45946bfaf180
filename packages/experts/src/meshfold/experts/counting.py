"""Positions of (token, expert) pairs in rows sorted by expert or by rank, by counting: no sort, no answer from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_RUN = 128
"""tokens that are counted separately before their sums are added up"""


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
    ones = torch.ones_like(bins, dtype=torch.int32)
    chosen = torch.zeros(experts + 1, tokens, dtype=torch.int32, device=index.device)
    chosen.scatter_add_(0, bins.t(), ones.t())
    counts = chosen[:experts].sum(1)
    starts = torch.cat([counts.cumsum(0) - counts, counts.new_zeros(1)])
    before = _running(chosen).gather(0, bins.t()) - chosen.gather(0, bins.t())
    # A token that names an expert twice has two rows: the second after the first.
    repeats = (bins.unsqueeze(2) == bins.unsqueeze(1)).tril(-1).sum(2)
    return torch.where(valid, before.t() + starts[bins] + repeats, -1), counts


def rank_places(index: Tensor, experts_each: int, ranks: int, sharing: int = 1) -> tuple[Tensor, Tensor]:
    """Give one row to every rank that has any of a token's experts.

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
    return _running(chosen) - chosen + starts.unsqueeze(1), counts


def _running(chosen: Tensor) -> Tensor:
    """Return the sums up to each token, itself included: ``b n -> b n``, int32.

    Two levels, runs of tokens first: a GPU scans a few long rows no faster than one thread reads one row.
    """
    bins, tokens = chosen.shape
    if tokens <= 2 * _RUN:
        return chosen.cumsum(1, dtype=torch.int32)
    runs = F.pad(chosen, (0, -tokens % _RUN)).view(bins, -1, _RUN).cumsum(2, dtype=torch.int32)
    ends = runs[:, :, -1]
    earlier = ends.cumsum(1, dtype=torch.int32) - ends
    return (runs + earlier.unsqueeze(2)).flatten(1)[:, :tokens]


def pairs_of(places: Tensor, rows: int) -> Tensor:
    """Return the pairs [rows] of places [n, j]: the inverse."""
    flat = places.flatten()
    numbers = torch.arange(flat.numel(), device=places.device)
    # Pairs without a row are written to an extra row, which is cut off.
    target = torch.where(flat < 0, rows, flat)
    return torch.zeros(rows + 1, dtype=torch.int64, device=places.device).scatter_(0, target, numbers)[:rows]
