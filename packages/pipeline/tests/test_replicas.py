"""Pipelines side by side have equally many micro-batches; those that fill up count nothing."""

from __future__ import annotations

import torch

from meshfold.pipeline.runtime.microbatch import NO_REPLICAS, Replicas, split


def test_the_last_one_again_without_weight() -> None:
    ids = torch.arange(12).view(3, 4)
    works = split(ids, 3)
    filled = Replicas(agree_on_count=lambda count: count + 2).filled(works)
    assert [float(work.weight) for work in filled] == [float(work.weight) for work in works] + [0.0, 0.0]
    assert sum(float(work.weight) for work in filled) == 1.0
    for filler in filled[3:]:
        assert torch.equal(filler.args[0], ids[2:]) and filler.first_row == works[2].first_row


def test_the_others_are_asked_with_the_own_number() -> None:
    asked: list[int] = []

    def agree(count: int) -> int:
        asked.append(count)
        return count

    works = split(torch.zeros(4, 2, dtype=torch.int64), 2)
    assert Replicas(agree_on_count=agree).filled(works) == works and asked == [2]
    assert NO_REPLICAS.filled(works) == works
