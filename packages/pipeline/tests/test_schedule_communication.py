"""The lowering: sends and receives in pairs, no deadlock under any way to run them, gradients whole where it says so."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import NAMED, named, random_schedule, some_counts

from meshfold.pipeline import (
    Action,
    Costs,
    Op,
    Program,
    Receive,
    ReduceGradients,
    Schedule,
    ScheduleError,
    Send,
    communicate,
    schedule,
)
from meshfold.pipeline.scheduling.communication import Step, prove

MANY = settings(max_examples=2 * settings().max_examples)


def rendezvous(program: Program, seed: int) -> bool:
    """Whether a program ends where a send waits for its receive and a receive for its send: an executable model.

    Each rank is a process; any that can go on may be the next. What travels is checked to be what was meant.
    """
    r = Random(seed)
    at = [0] * len(program.ranks)

    def now(rank: int) -> Step | None:
        steps = program.ranks[rank]
        return steps[at[rank]] if at[rank] < len(steps) else None

    while True:
        able: list[tuple[int, ...]] = []
        for rank in range(len(at)):
            step = now(rank)
            if isinstance(step, Send):
                other = now(step.peer)
                if isinstance(other, Receive) and other == Receive(step.kind, step.stage, step.microbatch, rank):
                    able.append((rank, step.peer))
            elif step is not None and not isinstance(step, Receive):
                able.append((rank,))
        if not able:
            return all(now(rank) is None for rank in range(len(at)))
        for rank in r.choice(able):
            at[rank] += 1


def batched(program: Program, seed: int) -> bool:
    """The same where messages that follow each other are posted at once, and waited for together."""
    r = Random(seed)
    programs: list[deque[object]] = [deque(program.batches(rank)) for rank in range(len(program.ranks))]
    posted: list[set[Step]] = [set() for _ in programs]

    def post(rank: int) -> None:
        if programs[rank] and isinstance(programs[rank][0], tuple):
            posted[rank] |= set(programs[rank][0])

    def can(rank: int) -> bool:
        head = programs[rank][0]
        if not isinstance(head, tuple):
            return True
        return all(
            (Receive if isinstance(m, Send) else Send)(m.kind, m.stage, m.microbatch, rank) in posted[m.peer]
            for m in head
        )

    for rank in range(len(programs)):
        post(rank)
    while True:
        able = [rank for rank in range(len(programs)) if programs[rank] and can(rank)]
        if not able:
            return not any(programs)
        rank = r.choice(able)
        programs[rank].popleft()
        post(rank)


def actions_of(program: Program) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(step for step in steps if isinstance(step, Action)) for steps in program.ranks)


def judge(program: Program, seed: int) -> None:
    made = program.schedule
    assert actions_of(program) == made.ranks
    messages = Counter(
        (type(step).__name__, step.kind)
        for steps in program.ranks
        for step in steps
        if isinstance(step, Send | Receive)
    )
    crossings = sum(a != b for a, b in zip(made.stage_ranks, made.stage_ranks[1:], strict=False)) * made.microbatches
    assert all(messages[way, kind] == crossings for way in ("Send", "Receive") for kind in ("activation", "gradient"))
    for rank, steps in enumerate(program.ranks):
        there: set[tuple[str, int, int]] = set()
        for step in steps:
            if isinstance(step, Receive):
                there.add((step.kind, step.stage, step.microbatch))
            elif isinstance(step, Send):
                assert program.schedule.stage_ranks[step.stage] == step.peer != rank
            elif isinstance(step, Action) and step.op is not Op.W:
                kind = "activation" if step.op is Op.F else "gradient"
                neighbour = step.stage + (-1 if step.op is Op.F else 1)
                if 0 <= neighbour < made.stages and made.stage_ranks[neighbour] != rank:
                    assert (kind, step.stage, step.microbatch) in there
        for stage in made.stages_of(rank):
            whole = steps.index(ReduceGradients(stage))
            rest = [step for step in steps[whole:] if isinstance(step, Action) and step.finishes_weights]
            assert all(step.stage != stage for step in rest)
            before = [step for step in steps[:whole] if isinstance(step, Action) and step.stage == stage]
            assert sum(step.finishes_weights for step in before) == made.microbatches
    assert sum(isinstance(step, ReduceGradients) for steps in program.ranks for step in steps) == made.stages
    assert rendezvous(program, seed)
    assert batched(program, seed)


@MANY
@given(st.integers(0, 10**9))
def test_random_lists_under_random_costs(seed: int) -> None:
    made, r = random_schedule(seed), Random(seed)
    durations = [r.choice((0.0, 1.0, r.random())) for _ in range(3)]
    costs = Costs(
        forward=durations[0],
        backward_input=durations[1],
        backward_weight=durations[2],
        send=r.choice((0.0, 0.3)),
    )
    judge(communicate(made, r.choice((None, costs))), seed)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "options"), NAMED)
def test_named_schedules(name: str, options: dict[str, int], ranks: int) -> None:
    for m in some_counts(ranks)[:: 1 if ranks < 8 else 3]:
        judge(communicate(named(name, ranks, m, options)), m)


def test_by_hand() -> None:
    program = communicate(schedule("1f1b", ranks=2, microbatches=2))
    assert str(program) == (
        "1f1b: 2 ranks, 2 micro-batches, stages on 0 1\n"
        "rank 0: 0F0 >1F0@1 0F1 >1F1@1 <0B0@1 0BW0 <0B1@1 0BW1 0R\n"
        "rank 1: <1F0@0 1F0 <1F1@0 1BW0 >0B0@0 1F1 1BW1 >0B1@0 1R"
    )
    assert [len(one) for one in program.batches(0) if isinstance(one, tuple)] == [1, 2, 1]
    same_rank = communicate(Schedule.of(["0F0 1F0 2F0 2BW0 1BW0 0BW0"]))
    assert str(same_rank).endswith("rank 0: 0F0 1F0 2F0 2BW0 2R 1BW0 1R 0BW0 0R")


def exchanged(program: Program) -> Iterator[Program]:
    """The program with two steps that follow each other on a rank in the other order, for all such pairs."""
    for rank, steps in enumerate(program.ranks):
        for i in range(len(steps) - 1):
            other = [*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]]
            ranks = list(program.ranks)
            ranks[rank] = tuple(other)
            yield replace(program, ranks=tuple(ranks))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9))
def test_the_proof_says_what_the_models_say(seed: int) -> None:
    """For programs that are nearly right: refused if and only if something waits for ever, is unpaired or has no input."""
    verdicts = Counter[bool]()
    for other in exchanged(communicate(random_schedule(seed))):
        try:
            prove(other)
        except ScheduleError as error:
            verdicts[False] += 1
            if "forever" in str(error) or "sends" in str(error):
                assert not (rendezvous(other, seed) and batched(other, seed))
        else:
            verdicts[True] += 1
            assert rendezvous(other, seed)
            assert batched(other, seed)


def test_programs_that_are_refused() -> None:
    program = communicate(schedule("1f1b", ranks=2, microbatches=2))
    text = str(program)
    for old, new, said in (
        (
            ">1F1@1 <0B0@1",
            "<0B0@1 >1F1@1",
            "these ranks wait for each other forever: rank 0 at <0B0@1, rank 1 at <1F1@0",
        ),
        (">1F1@1 ", "", "rank 0 sends nothing to rank 1, which receives 1F1 at that position"),
        ("0F0 >1F0@1", ">1F0@1 0F0", "rank 0 has >1F0@1 before it has what 0F0 makes"),
        ("<0B1@1 0BW1", "0BW1 <0B1@1", "rank 0 has 0BW1 before it has what 1B1 makes"),
    ):
        assert old in text
        with pytest.raises(ScheduleError, match=said.replace("(", r"\(")):
            prove(replace(program, ranks=Program.parse(text.replace(old, new, 1)).ranks))


def test_schedules_that_cannot_run_are_refused_first() -> None:
    with pytest.raises(ScheduleError, match="0W0 is missing"):
        communicate(Schedule.parse("0F0 0B0"))
