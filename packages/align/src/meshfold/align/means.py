"""Means over the global batch: of tokens, of sequences, of groups; never a mean of the means of ranks.

Ranks have sequences of different lengths, and some have none. A mean over all of them is the sum of all items over the number
of all items. So a loss is kept as these two numbers, :class:`Mean`, until the ranks have added up the second one::

    mean = mean_of_tokens(losses, mask)      # this rank's sum, and how many tokens it is of
    mean.part(group).backward()              # sum / tokens of all ranks: the ranks' parts add up to the mean

Gradients are then summed over the ranks, not averaged. In an engine :class:`meshfold.align.Objective` does the same.
Other statistics (the mean and deviation for whitening advantages, or of a group) are global in the same way: sums over all
ranks, divided once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshfold.mesh import Group, SpecError, all_reduce

Over = Literal["tokens", "sequences"]


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over items that ranks share.

    Attributes:
        total: the sum of this rank's items: a scalar with a gradient.
        count: how many items those are: a scalar in float64.
        over: what the items are. Sequences are completions, or pairs of them.
        weight: factor of the mean, where a loss is the sum of several.
    """

    total: Tensor
    count: Tensor
    over: Over
    weight: float = 1.0

    def part(self, group: Group | None = None) -> Tensor:
        """Return this rank's part of the mean: summed over the ranks, parts give the mean and their gradients its gradient.

        Args:
            group: the ranks that have different sequences; all of them must call. None: there are no others.

        Returns:
            A scalar in the dtype of ``total``; 0 where no rank has an item.
        """
        count = self.count if group is None else all_reduce(self.count, group)
        return self.weight * self.total / count.clamp(min=1).to(self.total.dtype)

    def value(self, group: Group | None = None) -> Tensor:
        """Return the mean, without a gradient and the same on all ranks; all of them must call."""
        part = self.part(group).detach()
        return part if group is None else all_reduce(part, group)

    def times(self, weight: float) -> Mean:
        """Return the mean with a further factor."""
        return Mean(total=self.total, count=self.count, over=self.over, weight=self.weight * weight)


def mean_of_tokens(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean over the tokens that count (SFT; DAPO, arXiv 2503.14476): long sequences weigh more.

    Args:
        values: ``n s``.
        mask: ``n s``, True for tokens that count. Values elsewhere may be anything, NaN too.
    """
    mask = _mask_of(values, mask)
    return Mean(total=_kept(values, mask).sum(), count=mask.sum().double(), over="tokens")


def mean_of_token_means(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean over sequences of the mean over the tokens of each (GRPO, arXiv 2402.03300): sequences weigh the same.

    A sequence without a token that counts is no sequence of the mean.

    Args:
        values, mask: as for :func:`mean_of_tokens`.
    """
    mask = _mask_of(values, mask)
    tokens = mask.sum(-1)
    each = _kept(values, mask).sum(-1) / tokens.clamp(min=1)
    return Mean(total=each.sum(), count=(tokens > 0).sum().double(), over="sequences")


def mean_over_length(values: Tensor, mask: Tensor, length: int) -> Mean:
    """Return the mean over sequences of the sum of each, divided by one length for all (Dr. GRPO, arXiv 2503.20783).

    Args:
        values, mask: as for :func:`mean_of_tokens`.
        length: the tokens that a completion may have at most.

    Raises:
        SpecError: for a length below 1.
    """
    if length < 1:
        raise SpecError(f"length={length!r}: the most tokens that a completion may have, 1 or more")
    mask = _mask_of(values, mask)
    total = _kept(values, mask).sum() / length
    return Mean(total=total, count=(mask.sum(-1) > 0).sum().double(), over="sequences")


def mean_of_sequences(values: Tensor, counts: Tensor | None = None) -> Mean:
    """Return the mean over sequences or pairs.

    Args:
        values: ``n``.
        counts: ``n``, True for those that count; None: all.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if counts is None else _mask_of(values, counts)
    return Mean(total=_kept(values, mask).sum(), count=mask.sum().double(), over="sequences")


def global_mean(values: Tensor, mask: Tensor | None = None, group: Group | None = None) -> Tensor:
    """Return the mean of a statistic over all ranks, without a gradient: a scalar in float64; 0 of nothing.

    Args:
        values: of any shape.
        mask: of the same shape: those that count; None: all.
        group: the ranks that have different ones; all of them must call.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else _mask_of(values, mask)
    sums = torch.stack([_kept(values.detach().double(), mask).sum(), mask.sum().double()])
    total, count = (sums if group is None else all_reduce(sums, group)).unbind()
    return total / count.clamp(min=1)


def whiten(
    values: Tensor, mask: Tensor, group: Group | None = None, *, shift: bool = True, eps: float = 1e-8
) -> Tensor:
    """Return values with the global variance 1 and, unless ``shift`` is False, the global mean 0.

    The variance is unbiased (n - 1), as in PPO's usual code; values that do not count become 0.

    Args:
        values: ``n s``, without a gradient.
        mask: ``n s``, True for tokens that count.
        group: the ranks that have different ones; all of them must call.
        shift: subtract the mean.
        eps: added to the variance.
    """
    mask = _mask_of(values, mask)
    count = mask.sum().double()
    count = count if group is None else all_reduce(count, group)
    mean = global_mean(values, mask, group)
    squares = global_mean((values.double() - mean).square(), mask, group)
    variance = squares * count / (count - 1).clamp(min=1)
    found = (values.double() - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask, found if shift else found + mean, 0.0).to(values.dtype)


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    count: int,
    group: Group | None = None,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
) -> Tensor:
    """Return each completion's reward minus the mean of its group, divided by a deviation (GRPO, arXiv 2402.03300, section 4.1).

    A group is all completions of one prompt, on whatever rank. A completion that could not be scored has reward NaN: no mean
    includes it, and its advantage is 0.

    Args:
        rewards: ``n``.
        groups: ``n`` int64, from 0 to ``count`` - 1: which group each belongs to.
        count: groups of all ranks.
        group: the ranks that have different completions; all of them must call.
        scale: divide by the unbiased deviation of the ``"group"``, or of the rewards of the whole ``"batch"``; or ``"none"`` (Dr.
            GRPO).
        eps: added to the deviation.

    Raises:
        SpecError: for another scale, or group numbers out of range.
    """
    if scale not in ("group", "batch", "none"):
        raise SpecError(f"scale={scale!r}: use 'group', 'batch' or 'none'")
    sums = _GroupSums(rewards, groups, count, group)
    shifted = torch.where(sums.known, sums.rewards - sums.mean()[groups], 0.0)
    if scale == "none":
        return shifted.to(rewards.dtype)
    if scale == "group":
        squares = sums.over_groups(shifted.square())
        deviation = (squares / (sums.counts - 1).clamp(min=1)).sqrt()[groups]
    else:
        middle = sums.sums.sum() / sums.counts.sum().clamp(min=1)
        squares = sums.over_groups(torch.where(sums.known, (sums.rewards - middle).square(), 0.0)).sum()
        deviation = (squares / (sums.counts.sum() - 1).clamp(min=1)).sqrt()
    return (shifted / (deviation + eps)).to(rewards.dtype)


def leave_one_out(rewards: Tensor, groups: Tensor, count: int, group: Group | None = None) -> Tensor:
    """Return each completion's reward minus the mean of the others of its group (RLOO, arXiv 2402.14740, equation 9).

    0 for a completion that is alone, or that could not be scored (NaN).

    Args:
        rewards, groups, count, group: as for :func:`group_advantages`.

    Raises:
        SpecError: for group numbers out of range.
    """
    sums = _GroupSums(rewards, groups, count, group)
    others = sums.counts[groups] - 1
    baseline = (sums.sums[groups] - sums.rewards) / others.clamp(min=1)
    return torch.where(sums.known & (others > 0), sums.rewards - baseline, 0.0).to(rewards.dtype)


class _GroupSums:
    """Sums and counts of the scored rewards of each group, over all ranks.

    Attributes:
        rewards: this rank's in float64, 0 where unknown.
        known: where they are not NaN.
        sums, counts: of each group.
    """

    def __init__(self, rewards: Tensor, groups: Tensor, count: int, group: Group | None) -> None:
        if groups.shape != rewards.shape or rewards.dim() != 1:
            raise SpecError(f"rewards {list(rewards.shape)} with groups {list(groups.shape)}: one group a completion")
        if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < count:
            raise SpecError(
                f"groups from {int(groups.min())} to {int(groups.max())}, and there are {count}: 0 to {count - 1}"
            )
        self._groups, self._count, self._group = groups, count, group
        self.known = ~rewards.isnan()
        self.rewards = torch.where(self.known, rewards.detach().double(), 0.0)
        self.sums, self.counts = self.over_groups(self.rewards), self.over_groups(self.known.double())

    def over_groups(self, values: Tensor) -> Tensor:
        """Return the sum of each group over all ranks: ``n -> count``."""
        mine = values.new_zeros(self._count).index_add(0, self._groups, values)
        return mine if self._group is None else all_reduce(mine, self._group)

    def mean(self) -> Tensor:
        """Return the mean of each group; 0 for one without a known reward."""
        return self.sums / self.counts.clamp(min=1)


def _mask_of(values: Tensor, mask: Tensor) -> Tensor:
    if mask.shape != values.shape:
        raise SpecError(f"a mask {list(mask.shape)} for values {list(values.shape)}: give one number a value")
    return mask.bool()


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values that count, 0 elsewhere, also in the gradient."""
    return torch.where(mask, values, 0.0)
