"""Capacity: the most tokens that an expert takes of a batch, and so the most rows that a rank of experts can get."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshfold.kernels import expert_places
from meshfold.mesh import Group, SpecError, all_gather
from meshfold.mesh.processes import is_simulated


def check_capacity(capacity: float | None) -> None:
    """Raise SpecError unless a capacity is a positive number or None."""
    if capacity is None or (isinstance(capacity, int | float) and math.isfinite(capacity) and capacity > 0):
        return
    raise SpecError(f"capacity={capacity!r}: write a positive number, such as 1.25, or None for no limit")


def within_capacity(index: Tensor, experts: int, capacity: float, group: Group | None) -> Tensor:
    """Return the index with -1 for tokens over the capacity of their expert: ``[n, k] -> [n, k]``.

    Pairs are counted in the order of the ranks, then of the tokens. Costs one all-gather of ``experts + 1`` numbers. Simulated
    ranks all send what this one does, each an equal part of the capacity.

    Args:
        index: [n, k] whole numbers; those outside of 0 to experts - 1 are nobody's.
        experts: how many there are.
        capacity: of :func:`check_capacity`.
        group: the ranks with tokens; None for this one alone.
    """
    places, _, ends = expert_places(index, experts)
    counts = ends.long().diff(prepend=ends.new_zeros(1).long())
    mine = torch.cat([counts, torch.full_like(counts[:1], index.shape[0])])
    everyone = mine.unsqueeze(0) if group is None else all_gather(mine.unsqueeze(0), group, 0)
    earlier = everyone[: 0 if group is None else group.index].sum(0)[:experts]
    pairs = everyone[:, experts].sum() * index.shape[1]
    # As most_of_an_expert: whole numbers are divided exactly. A GPU divides floats by a constant less exactly.
    most = (torch.ceil(pairs.double() * capacity).long() + (experts - 1)) // experts
    if group is not None and is_simulated():
        earlier = torch.zeros_like(counts)
        most = torch.full_like(most, most_of_an_expert(group.size * index.numel(), experts, capacity) // group.size)
    starts = counts.cumsum(0) - counts
    shift = torch.cat([earlier - starts, earlier.new_zeros(1)])
    bins = torch.where(places < 0, experts, index).long()
    position = places + shift[bins]
    return torch.where((places >= 0) & (position < most), index, -1)


def most_of_an_expert(pairs: int, experts: int, capacity: float) -> int:
    """Return the most tokens that an expert takes: ``ceil(capacity · pairs / experts)``; no fewer for more pairs.

    Args:
        pairs: of all ranks' tokens with their experts: tokens · k.
        experts: how many there are.
        capacity: of :func:`check_capacity`.
    """
    return -(-math.ceil(pairs * capacity) // experts)


def most_rows(pairs: int, experts: int, experts_here: int, capacity: float | None) -> int:
    """Return the most rows that some experts can get, known without the device.

    Args:
        pairs: at least those of all ranks' tokens with their experts: tokens · k.
        experts: how many there are on all ranks.
        experts_here: how many of them get the rows.
        capacity: of :func:`check_capacity`; None: all pairs may be theirs.
    """
    return pairs if capacity is None else min(pairs, experts_here * most_of_an_expert(pairs, experts, capacity))


def kept_share(capacity: float | None) -> float:
    """Return the share of pairs that evenly used experts take."""
    return 1.0 if capacity is None else min(1.0, capacity)


def chance_missed(experts: int, experts_here: int, top_k: int, capacity: float | None) -> float:
    """Return the share of tokens that no expert of some gets, if each token chooses ``top_k`` different ones at random."""
    kept = kept_share(capacity)
    return sum(
        math.comb(top_k, j)
        * kept**j
        * (1 - kept) ** (top_k - j)
        * math.comb(experts - experts_here, j)
        / math.comb(experts, j)
        for j in range(top_k + 1)
    )
