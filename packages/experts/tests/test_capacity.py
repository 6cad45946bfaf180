"""A capacity bounds the rows of experts, so that an all-gather has room for no more; plans and simulated ranks keep to it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from expert_models import EXPERTS, HIDDEN
from torch import Tensor

from meshfold.experts import ExpertRows, Experts, chosen_exchange, dispatch
from meshfold.experts.capacity import chance_missed, most_of_an_expert
from meshfold.mesh import Mesh, SpecError, record
from meshfold.mesh.testing import fake_world, ranks


@ranks(4)
def test_rows_of_experts_take_no_more_room_than_a_capacity_leaves() -> None:
    """All tokens want the two experts of rank 0, which fill its room; nobody's tokens that pad a rank's count on it."""
    group = Mesh({"expert": 4}).group("expert")
    k = 6
    cases: list[
        tuple[tuple[int, ...], float, str, int, int]
    ] = [  # tokens, capacity, exchange, room of a rank, rows of rank 0
        ((10, 10, 10, 10), 1.25, "auto", 2 * 38, 2 * 38),  # 1.25 · 40 tokens · 6 / 8 experts = 37.5
        ((10, 11, 12, 13), 0.5, "all_gather", 2 * 20, 2 * 18),  # of 52 tokens with padding 19.5, of 46 without 17.25
        ((1, 1, 1, 1), 100.0, "all_gather", 24, 24),  # no more than there are
    ]
    for all_tokens, capacity, exchange, room, used in cases:
        tokens = all_tokens[group.index]
        index = torch.arange(k).expand(tokens, k) % (EXPERTS // 4)
        seen: list[tuple[int, int]] = []

        def run(rows: ExpertRows, seen: list[tuple[int, int]] = seen) -> Tensor:
            seen.append((rows.values.shape[0], int(rows.filled)))
            return rows.values

        with record() as log:
            how: Any = dict(experts=EXPERTS, group=group, capacity=capacity, exchange=exchange)
            dispatch(torch.randn(tokens, HIDDEN), index, torch.rand(tokens, k), run, **how)
        kinds = [entry.kind for entry in log.entries]
        assert kinds == ["all_reduce", "all_gather", "all_gather", "all_gather", "all_to_all"]
        assert seen == [(room, 0 if group.index else used)]


def test_with_a_capacity_any_number_of_ranks_may_choose_an_all_gather() -> None:
    gathered = [
        (blocks, k, capacity)
        for blocks, k, capacity in product((2, 4, 8), (1, 2, 8), (0.25, 1.25, 2, 2.5))
        if chosen_exchange("auto", blocks=blocks, top_k=k, capacity=capacity) == "all_gather"
    ]  # a capacity bounds the room; few tokens within it leave most rows of an all-gather unused
    two = [(2, k, c) for k, c in ((2, 1.25), (2, 2), (2, 2.5), (8, 0.25), (8, 1.25), (8, 2), (8, 2.5))]
    assert gathered == [*two, (4, 8, 1.25), (4, 8, 2), (8, 8, 1.25), (8, 8, 2)]


def test_simulated_ranks_send_no_more_than_a_capacity() -> None:
    """All pairs go to two experts of the last rank; each of four ranks fills a quarter of their capacity."""
    tokens = 32
    index = (torch.arange(EXPERTS) // 4 + 6).expand(tokens, EXPERTS)
    with fake_world(4, rank=3):
        for capacity, of_each in ((0.1, 13 // 4), (1.25, 160 // 4), (1.3, 167 // 4)):
            for exchange in ("all_to_all", "all_gather"):
                seen: list[Tensor] = []

                def run(rows: ExpertRows, seen: list[Tensor] = seen) -> Tensor:
                    seen.append(rows.ends)
                    return rows.values

                group = Mesh({"expert": 4}).group("expert")
                how: Any = dict(experts=EXPERTS, group=group, capacity=capacity, exchange=exchange)
                dispatch(torch.ones(tokens, HIDDEN), index, torch.ones(tokens, EXPERTS), run, **how)
                # An all-to-all of simulated ranks brings what this rank sends to itself.
                taken = 4 * of_each if exchange == "all_gather" else of_each
                assert [ends.tolist() for ends in seen] == [[taken, 2 * taken]]


def test_plans_know_how_many_tokens_are_within_a_capacity() -> None:
    """Tokens with random experts of their own lose some of them."""
    generator = torch.Generator().manual_seed(0)
    owner = torch.rand(20000, EXPERTS, generator=generator).topk(3).indices // 2
    for capacity in (None, 2.0, 0.7, 0.3):
        lost = torch.rand(owner.shape, generator=generator) > (1.0 if capacity is None else capacity)
        missed = 1 - float(((owner == 0) & ~lost).any(1).double().mean())
        assert chance_missed(EXPERTS, 2, 3, capacity) == pytest.approx(missed, abs=0.01)


def test_the_most_of_an_expert_is_rounded_up_exactly() -> None:
    assert most_of_an_expert(48, 60, 1.25) == 1 and most_of_an_expert(49, 60, 1.25) == 2
    assert most_of_an_expert(3 * 10**9, 3, 1) == 10**9 and most_of_an_expert(0, 8, 0.5) == 0
    found = [most_of_an_expert(pairs, 7, 1.1) for pairs in range(200)]
    assert found == sorted(found)


def test_a_capacity_that_is_no_positive_number_is_refused() -> None:
    for capacity in (0, -1.0, float("nan"), "all"):
        with pytest.raises(SpecError, match="capacity="):
            Experts(8, 12, 6, capacity)(torch.zeros(2, 8), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1))  # type: ignore[arg-type]
