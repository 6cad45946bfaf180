"""``schedule(...)``: names, numbers, functions of one's own, and what is said of mistakes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from meshfold.pipeline import Action, Op, Schedule, ScheduleError, schedule, simulate


def test_chunks_and_waves() -> None:
    assert schedule("interleaved", ranks=2, microbatches=4).chunks == 2
    assert schedule("interleaved", ranks=2, microbatches=4, chunks=3).stages == 6
    assert (
        schedule("interleaved", ranks=3, microbatches=4, chunks=1).ranks
        == schedule("1f1b", ranks=3, microbatches=4).ranks
    )
    assert schedule("hanayo", ranks=2, microbatches=4).chunks == 2
    assert schedule("hanayo", ranks=2, microbatches=4, waves=2).chunks == 4
    # what is said twice may be said
    assert schedule("hanayo", ranks=2, microbatches=4, waves=2, chunks=4).chunks == 4
    assert schedule("zb-v", ranks=2, microbatches=4, chunks=2).chunks == 2
    assert schedule("1f1b", ranks=2, microbatches=4, chunks=1).chunks == 1


@pytest.mark.parametrize(
    ("name", "numbers", "said"),
    [
        ("1f1p", {}, r"schedule '1f1p' is not known. Did you mean '1f1b'\?"),
        ("1F1B", {}, r"Did you mean '1f1b'\? Known are gpipe, 1f1b, .*, auto; or give a function"),
        ("1f1b", dict(ranks=0), "ranks=0 is not a count. Give a whole number from 1"),
        ("1f1b", dict(microbatches=True), "microbatches=True is not a count"),
        ("1f1b", dict(microbatches=2.0), r"microbatches=2\.0 is not a count"),
        (
            "1f1b",
            dict(chunks=2),
            "under schedule '1f1b' a rank holds 1 stages, not chunks=2.*name 'interleaved'",
        ),
        ("zb-v", dict(chunks=4), "under schedule 'zb-v' a rank holds 2 stages"),
        ("hanayo", dict(chunks=6), "holds 2 stages, not chunks=6. Leave chunks out, or write waves=3"),
        ("gpipe", dict(waves=1), "waves=1 belongs to schedule 'hanayo', and the schedule is 'gpipe'"),
        ("auto", dict(waves=1), "waves=1 belongs to schedule 'hanayo'"),
    ],
)
def test_mistakes(name: str, numbers: dict[str, int], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        schedule(name, **{**dict(ranks=2, microbatches=4), **numbers})


def by_twos(*, ranks: int, microbatches: int) -> list[list[Action]]:
    """1F1B with steps of two micro-batches."""
    lists = []
    for rank in range(ranks):
        turns = [(op, i) for pair in range(0, microbatches, 2) for op in (Op.F, Op.BW) for i in (pair, pair + 1)]
        lists.append([Action(op, rank, i) for op, i in turns if i < microbatches])
    return lists


def test_functions_of_ones_own() -> None:
    made = schedule(by_twos, ranks=3, microbatches=5)
    assert (made.name, made.chunks, made.microbatches) == ("by_twos", 1, 5)
    assert max(simulate(made).peak) == 2

    def as_text(*, ranks: int, microbatches: int) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in by_twos(ranks=ranks, microbatches=microbatches))

    def as_lines(*, ranks: int, microbatches: int) -> Sequence[str]:
        return as_text(ranks=ranks, microbatches=microbatches).splitlines()

    def whole(*, ranks: int, microbatches: int) -> Schedule:
        return schedule("zb-h1", ranks=ranks, microbatches=microbatches)

    assert schedule(as_text, ranks=3, microbatches=5).ranks == made.ranks
    assert schedule(as_text, ranks=3, microbatches=5).name == "as_text"
    assert schedule(as_lines, ranks=3, microbatches=5).ranks == made.ranks
    assert schedule(whole, ranks=3, microbatches=5).name == "zb-h1"

    def chunked(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
        return schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)

    assert schedule(chunked, ranks=2, microbatches=2).chunks == 2
    assert schedule(chunked, ranks=2, microbatches=2, chunks=3).chunks == 3


def test_functions_that_return_what_cannot_run() -> None:
    def late(*, ranks: int, microbatches: int) -> list[str]:
        return ["0BW0 0F0"]

    with pytest.raises(ScheduleError, match="schedule 'late': rank 0 lists 0BW0 at position 0, before 0F0"):
        schedule(late, ranks=1, microbatches=1)
    with pytest.raises(ScheduleError, match="schedule 'late' was asked for 2 ranks and returned 1"):
        schedule(late, ranks=2, microbatches=1)
    with pytest.raises(ScheduleError, match=r"0F1 is missing on rank 0. Add 0F1, 0B1 and 0W1"):
        schedule(lambda ranks, microbatches: ["0F0 0BW0"], ranks=1, microbatches=2)
    with pytest.raises(ScheduleError, match=r"is called with ranks=2, microbatches=1, chunks=2, .*unexpected keyword"):
        schedule(by_twos, ranks=2, microbatches=1, chunks=2)
    with pytest.raises(ScheduleError, match="rank 0 holds 2 activations, but the bound is 1"):
        schedule(by_twos, ranks=2, microbatches=2, memory=1)
