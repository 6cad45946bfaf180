"""Means over ranks with unequal and with no sequences equal those of one process: value, every gradient, statistics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshfold.align import (
    Mean,
    global_mean,
    group_advantages,
    kto_baseline,
    leave_one_out,
    mean_of_sequences,
    mean_of_token_means,
    mean_of_tokens,
    mean_over_length,
    whiten,
)
from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.testing import ranks

LENGTHS = ([5, 2], [], [1, 7, 3], [0])
"""tokens of the sequences of each rank"""
WIDTH = 7


def of_all_ranks() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(len(n), WIDTH, dtype=torch.float64, generator=generator) for n in LENGTHS]
    masks = [torch.arange(WIDTH) < torch.tensor(n).view(-1, 1) for n in LENGTHS]
    for value, mask in zip(values, masks, strict=True):
        value[~mask] = torch.nan  # padding may be anything
    return values, masks


MEANS: tuple[Callable[[Tensor, Tensor], Mean], ...] = (
    mean_of_tokens,
    mean_of_token_means,
    lambda values, mask: mean_over_length(values, mask, 9),
    lambda values, mask: mean_of_sequences(torch.where(mask, values, 0.0).sum(-1).square(), mask.any(-1)).times(0.5),
)


@ranks(4)
def test_means_and_statistics_equal_one_process() -> None:
    group = Mesh({"data": 4}).group("data")
    values, masks = of_all_ranks()
    whole, mask = torch.cat(values), torch.cat(masks)
    here = slice(sum(map(len, LENGTHS[: group.index])), sum(map(len, LENGTHS[: group.index + 1])))
    for mean in MEANS:
        serial, mine = whole.clone().requires_grad_(), whole[here].clone().requires_grad_()
        expected = mean(serial, mask).part()
        part = mean(mine, mask[here]).part(group)
        torch.testing.assert_close(mean(mine, mask[here]).value(group), expected.detach(), rtol=0, atol=1e-13)
        expected.backward()
        part.backward()
        assert serial.grad is not None and mine.grad is not None
        torch.testing.assert_close(mine.grad, serial.grad[here], rtol=0, atol=1e-13)
        assert mine.grad.isfinite().all()

    close = dict(rtol=1e-12, atol=1e-12)
    for shift in (True, False):
        torch.testing.assert_close(
            whiten(whole[here], mask[here], group, shift=shift), whiten(whole, mask, shift=shift)[here], **close
        )
    torch.testing.assert_close(global_mean(whole[here], mask[here], group), whole[mask].mean(), **close)
    rewards = torch.tensor([1.0, 5.0, torch.nan, 2.0, 2.5, 7.0], dtype=torch.float64)[: len(whole)]
    groups = torch.tensor([0, 1, 0, 1, 0, 2])[: len(whole)]  # groups lie on several ranks, and one on none
    for scale in ("group", "batch", "none"):
        torch.testing.assert_close(
            group_advantages(rewards[here], groups[here], 3, group, scale=scale),
            group_advantages(rewards, groups, 3, scale=scale)[here],
            **close,
        )
    torch.testing.assert_close(
        leave_one_out(rewards[here], groups[here], 3, group), leave_one_out(rewards, groups, 3)[here], **close
    )
    ratios = whole[:, 0].nan_to_num()
    torch.testing.assert_close(
        kto_baseline(ratios[here], mask[here, 0], group), kto_baseline(ratios, mask[:, 0]), **close
    )


def test_means_of_means_would_differ() -> None:
    """The lengths above tell a mean of ranks' means from the mean."""
    values, masks = of_all_ranks()
    whole, mask = torch.cat(values), torch.cat(masks)
    for mean in MEANS:
        each = [mean(v, m).part() for v, m in zip(values, masks, strict=True)]
        assert abs(float(sum(each) / 4 - mean(whole, mask).part())) > 1e-3


def test_mistakes() -> None:
    with pytest.raises(SpecError, match="one number a value"):
        mean_of_tokens(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(SpecError, match="length=0"):
        mean_over_length(torch.ones(2, 3), torch.ones(2, 3), 0)
