"""The checker lets every valid list pass and says of every other what is wrong, where, and what to change."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import NAMED, is_valid, named, random_schedule, with_list

from meshfold.pipeline import Costs, Op, Schedule, ScheduleError, check, communicate, schedule, simulate

MANY = settings(max_examples=3 * settings().max_examples)


def refusal(made: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(made)
    return str(caught.value)


@MANY
@given(st.integers(0, 10**9))
def test_random_valid_lists_pass(seed: int) -> None:
    made = random_schedule(seed)
    assert is_valid(made)
    check(made)
    simulate(made)


@MANY
@given(st.integers(0, 10**9))
def test_a_dropped_action_is_named(seed: int) -> None:
    made, r = random_schedule(seed), Random(seed)
    rank, place = r.choice([(rank, i) for rank, own in enumerate(made.ranks) for i in range(len(own))])
    own = list(made.ranks[rank])
    gone = own.pop(place)
    said = refusal(with_list(made, rank, own))
    kind = "B" if gone.op is Op.BW else gone.op
    assert f"{gone.stage}{kind}{gone.microbatch} is missing on rank {rank}. Add " in said


@MANY
@given(st.integers(0, 10**9))
def test_a_doubled_action_is_named(seed: int) -> None:
    made, r = random_schedule(seed), Random(seed)
    rank, place = r.choice([(rank, i) for rank, own in enumerate(made.ranks) for i in range(len(own))])
    own = list(made.ranks[rank])
    again = r.randint(0, len(own))
    own.insert(again, own[place])
    first, second = [i for i, action in enumerate(own) if action == made.ranks[rank][place]]
    said = refusal(with_list(made, rank, own))
    assert f"rank {rank} lists {made.ranks[rank][place]} twice, at positions {first} and {second}" in said
    assert "Take one of them out" in said


@MANY
@given(st.integers(0, 10**9))
def test_a_moved_action_is_refused_exactly_where_that_matters(seed: int) -> None:
    made, r = random_schedule(seed), Random(seed)
    rank, place = r.choice([(rank, i) for rank, own in enumerate(made.ranks) for i in range(len(own))])
    own = list(made.ranks[rank])
    moved = own.pop(place)
    own.insert(r.randint(0, len(own)), moved)
    other = with_list(made, rank, own)
    if is_valid(other):
        check(other)
        communicate(other)
        return
    said = refusal(other)
    assert "before" in said
    assert str(moved) in said.replace(":", " ").replace(";", " ").replace(",", " ").replace(".", " ").split()
    assert "Move " in said


@MANY
@given(st.integers(0, 10**9))
def test_an_action_on_a_strange_rank_is_named(seed: int) -> None:
    made, r = random_schedule(seed), Random(seed)
    if len(made.ranks) == 1:
        return
    rank, place = r.choice([(rank, i) for rank, own in enumerate(made.ranks) for i in range(len(own))])
    own = list(made.ranks[rank])
    moved = own.pop(place)
    there = r.choice([other for other in range(len(made.ranks)) if other != rank])
    strange = with_list(with_list(made, rank, own), there, [*made.ranks[there], moved])
    said = refusal(strange)
    assert (
        f"rank {there} lists {moved} at position {len(made.ranks[there])}, and stage {moved.stage} is on rank {rank}"
        in said
    )
    assert f"Move {moved} to rank {rank}" in said


def test_what_the_messages_say() -> None:
    for text, said in (
        (
            "0F0 0B0",
            "schedule 'custom': 0W0 is missing on rank 0. Add it after 0B0, or write 0BW0 in place of 0B0.",
        ),
        ("0F0", "schedule 'custom': 0B0 is missing on rank 0. Add 0B0 and 0W0, or 0BW0, behind 0F0."),
        ("0F0 0W0", "schedule 'custom': 0B0 is missing on rank 0. Add it before 0W0."),
        ("0BW0", "schedule 'custom': 0F0 is missing on rank 0. Add it before 0BW0."),
        (
            "0F0 0B0 0BW0",
            "schedule 'custom': rank 0 lists 0BW0 at position 2 and 0B0 at position 1: a gradient twice. Take 0B0 out, or write "
            "0B0 and 0W0 in place of 0BW0.",
        ),
        (
            "0F0 0W0 0B0",
            "schedule 'custom': rank 0 lists 0W0 at position 1, before 0B0 at position 2. Move 0B0 before 0W0.",
        ),
        (
            "1F0 0F0 1BW0 0BW0",
            "schedule 'custom': rank 0 lists 1F0 at position 0, before 0F0 at position 1, whose result it needs. "
            "Move 0F0 before 1F0.",
        ),
        (
            "0F0 0BW0 0F1 0BW1\n1F1 1BW1 1F0 1BW0",
            "schedule 'custom': ranks wait for each other forever: rank 0 at position 1 has 0BW0, which needs 1BW0 of rank 1; "
            "rank 1 at position 0 has 1F1, which needs 0F1 of rank 0. Move 1BW0 before 1F1 on rank 1, or 0F1 before "
            "0BW0 on rank 0.",
        ),
        (
            "",
            "schedule 'custom': there is nothing to do. Give every rank a list of actions, such as '0F0 0BW0'.",
        ),
    ):
        assert refusal(Schedule.parse(text)) == said
    made = schedule("1f1b", ranks=2, microbatches=2)
    assert "stage 1 is on rank 7, and there are 2 ranks" in refusal(replace(made, stage_ranks=(0, 7)))
    assert "rank 1 lists 1F0 at position 0, and there are stages 0 to 0" in refusal(replace(made, stage_ranks=(0,)))
    assert "rank 0 lists 0F1 at position 1, and there are micro-batches 0 to 0" in refusal(
        replace(made, microbatches=1)
    )
    assert "0F2 is missing on rank 0. Add 0F2, 0B2 and 0W2" in refusal(replace(made, microbatches=3))


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_the_memory_bound_is_the_peak(name: str, options: dict[str, int]) -> None:
    made = named(name, 4, 9, options)
    costs = Costs(activation=[0.5 + 0.1 * (s % 3) for s in range(made.stages)], kept=0.75)
    peaks = simulate(made, activation=costs.activation, kept=costs.kept).peak
    check(made, memory=peaks, costs=costs)
    check(made, memory=max(peaks), costs=costs)
    for rank in range(4):
        less = list(peaks)
        less[rank] *= 0.99
        with pytest.raises(ScheduleError, match=rf"rank {rank} holds [\d.]+ activations, .*Move it after gradients"):
            check(made, memory=less, costs=costs)


def test_the_first_action_over_the_bound_is_named() -> None:
    with pytest.raises(ScheduleError, match="with 0F3 at position 3 rank 0 holds 4 activations, but the bound is 3"):
        schedule("gpipe", ranks=2, microbatches=8, memory=3)
    with pytest.raises(ScheduleError, match="memory has 3 bounds and there are 2 ranks"):
        schedule("gpipe", ranks=2, microbatches=8, memory=[1, 2, 3])
