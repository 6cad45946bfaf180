"""Positions of (token, expert) pairs in rows sorted by expert, by counting: no sort, no answer from the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels import dispatch

_RUN = 128
"""tokens that are counted separately before their sums are added up"""


def expert_places(index: Tensor, experts: int, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Give a row to every pair of a token with an expert: in the order of experts, then of tokens.

    Args:
        index: [n, k] whole numbers: experts; numbers outside of 0 to experts - 1 have no row. A token that names an expert
            twice has two rows, the second after the first.
        experts: how many there are.
        rows: m: no fewer than there are pairs with a row. None: n·k.

    Returns:
        places [n, k] int64: the row of each pair, -1 for none; pairs [m] int64: the pair t·k + i of each row, 0 for rows that have
        none; ends [experts] int32: the row after the last of each expert.
    """
    found = dispatch.twin(placed, _like(index)) if index.numel() else placed
    return found(index, experts, index.numel() if rows is None else rows)


def pairs_of(places: Tensor, rows: int) -> Tensor:
    """Return the pairs [rows] of places [n, j]: the inverse; 0 for rows that have none."""
    flat = places.flatten()
    numbers = torch.arange(flat.numel(), device=places.device)
    # Pairs without a row are written to an extra row, which is cut off.
    target = torch.where(flat < 0, rows, flat)
    return torch.zeros(rows + 1, dtype=torch.int64, device=places.device).scatter_(0, target, numbers)[:rows]


def running_counts(chosen: Tensor) -> Tensor:
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


def _like(index: Tensor) -> Tensor:
    """Return a tensor that stands for the index where implementations are chosen, which know floating dtypes only."""
    return index.new_empty(0, dtype=torch.float32)


# The reference in plain torch: it defines every result and the signature of the Triton version.


def placed(index: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return places, pairs and ends."""
    tokens = index.shape[0]
    valid = (index >= 0) & (index < experts)
    bins = torch.where(valid, index, experts).long()
    ones = torch.ones_like(bins, dtype=torch.int32)
    chosen = torch.zeros(experts + 1, tokens, dtype=torch.int32, device=index.device)
    chosen.scatter_add_(0, bins.t(), ones.t())
    counts = chosen[:experts].sum(1)
    starts = torch.cat([counts.cumsum(0) - counts, counts.new_zeros(1)])
    before = running_counts(chosen).gather(0, bins.t()) - chosen.gather(0, bins.t())
    repeats = (bins.unsqueeze(2) == bins.unsqueeze(1)).tril(-1).sum(2)
    places = torch.where(valid, before.t() + starts[bins] + repeats, -1)
    return places, pairs_of(places, rows), counts.cumsum(0, dtype=torch.int32)
