"""An error on one rank alone ends the others too, at once and with its cause; one that they share, or that it survives, not."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from meshfold.mesh import CollectiveError, Group, Mesh, all_reduce, barrier, receive
from meshfold.mesh.testing import close_pools, ranks, run_on_ranks
from meshfold.mesh.watchdog import diagnosis, monitor
from meshfold.mesh.watchdog.rank_errors import ErrorLocation, Failure, report_errors

BEAT_S = 0.1
LONG_S = 1.0
NEVER_S = 1e4
SLOW_BEAT_S = 2.0
"""Much more than a rank that has failed is given to go on"""


WRONG = "the labels are wrong"


class Trouble(Exception):
    """Of the tests."""


@report_errors
def step(*, fails: bool) -> None:
    if fails:
        raise Trouble(WRONG)


def caught(*, fails: bool) -> None:
    try:
        step(fails=fails)
    except Trouble:
        return
    assert not fails


@contextmanager
def watched(beat_s: float = BEAT_S) -> Iterator[Group]:
    usual, diagnosis._BEAT_S = diagnosis._BEAT_S, beat_s
    watch = monitor.watch(250.0)
    try:
        yield Mesh(dict(pipe=4)).group("pipe")
    finally:
        diagnosis._BEAT_S = usual
        watch.close()


def heard_of(rank: int) -> Failure:
    """Wait until that rank has failed once more than this one."""
    while True:
        for found in monitor._running[1]._failures.from_other_ranks():  # type: ignore[index]
            if found.rank == rank:
                return found
        time.sleep(BEAT_S)


def one_fails(how: str) -> tuple[str, float]:
    group = Mesh(dict(pipe=4)).group("pipe")
    looks = how != "messages to two that do not look" or group.index > 1
    diagnosis._BEAT_S = BEAT_S if looks else NEVER_S  # of this pool's ranks, which end with the test
    monitor.watch(250.0 if looks else 4 * NEVER_S)
    barrier(group)
    if how == "after errors of their own":
        for _ in range(0 if group.index == 3 else 3):
            caught(fails=True)
        barrier(group)
    began = time.monotonic()
    try:
        if group.index == 3:
            if how == "one that the others survive":
                try:
                    step(fails=True)
                except Trouble as error:
                    sys.last_value = error
                monitor._running[1]._at_exit()  # type: ignore[index]
            elif how == "at the end of its program":
                sys.last_value = Trouble(WRONG)
                monitor._running[1]._at_exit()  # type: ignore[index]  # what runs when Python ends
            else:
                step(fails=True)
        elif how == "one that the others survive":
            caught(fails=True)
            all_reduce(torch.ones(2), group)
        elif how.startswith("messages"):  # a chain: 0 waits for 1, that for 2, that for 3
            receive(torch.empty(2), group, group.index + 1).wait()
        else:
            all_reduce(torch.ones(2), group)
    except (CollectiveError, Trouble) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", time.monotonic() - began


def check(how: str) -> None:
    close_pools()  # ranks of other tests have had errors and steps of their own
    try:
        found = run_on_ranks(4, one_fails, how)
    finally:
        close_pools()  # its connections are broken now
    waited_in = "receive" if how.startswith("messages") else "all_reduce"
    for rank, (text, seconds) in enumerate(found[:3]):
        assert text.startswith(f"CollectiveError: rank 3 failed, so the others end: Trouble: {WRONG}\n"), text
        assert f"(Rank {rank} was in {waited_in} of (2,) float32" in text
        assert seconds < 100.0
        if how != "at the end of its program":
            assert "raise Trouble(WRONG)" in text and "test_rank_errors.py:" in text


def test_those_in_a_collective_end_with_the_cause() -> None:
    check("collective")


def test_those_who_wait_through_others_end_with_it_too() -> None:
    check("messages")


def test_one_that_ends_with_it_ends_those_that_wait_for_it() -> None:
    check("messages to two that do not look")


def test_an_error_that_ends_a_program_is_told() -> None:
    check("at the end of its program")


@pytest.mark.parametrize("how", ["after errors of their own", "one that the others survive"])
def test_errors_of_ones_own_make_nobody_deaf(how: str) -> None:
    check(how)


@ranks(4)
def test_an_error_that_all_have_and_catch_ends_nobody() -> None:
    with watched() as group:
        for late in (0, 3):  # the first is the one that serves the store
            if group.index != late:  # its error is the one that stands, and those that wait for it have had their own
                heard_of(late)
            caught(fails=True)
            if group.index == late:
                time.sleep(LONG_S)
            assert all_reduce(torch.ones(1), group).item() == 4.0


@ranks(4)
def test_an_error_after_which_a_rank_goes_on_is_taken_back() -> None:
    with watched(SLOW_BEAT_S) as group:  # the others give it two beats, in which a busy machine must let it come
        caught(fails=group.index == 1)
        barrier(group)
        failures = monitor._running[1]._failures  # type: ignore[index]
        assert not failures.has_failed  # rank 1 has taken it back, and did not wait for a beat
        barrier(group)
        assert failures.from_other_ranks() == []
        if group.index == 1:
            time.sleep(3 * SLOW_BEAT_S)
        assert all_reduce(torch.ones(1), group).item() == 4.0
        # The next one counts again.
        caught(fails=group.index == 1)
        assert group.index == 1 or heard_of(1).error == f"Trouble: {WRONG}"
        assert all_reduce(torch.ones(1), group).item() == 4.0


@ranks(2)
def test_nothing_is_told_where_nobody_watches() -> None:
    group = Mesh(dict(pipe=2)).group("pipe")
    caught(fails=group.index == 0)
    assert all_reduce(torch.ones(1), group).item() == 2.0


def test_a_failure_says_where_and_no_more_than_its_end() -> None:
    def deep(levels: int) -> None:
        if levels:
            exec(f"# {'long ' * 50}\ndeep(levels - 1)", {"deep": deep, "levels": levels})
        else:
            raise Trouble("x" * 30_000)

    try:
        deep(3)
    except Trouble as error:
        place = ErrorLocation(kind="Trouble", step=7, counts=(("all", 3), ("row", 1)))
        found = Failure.of(error, 2, place, order=5)
    assert found == Failure.from_json(found.to_json())
    assert found.error.startswith("Trouble: xxx") and found.traceback.startswith("...\n")
    assert len(found.traceback) == 20_004
    assert "(Rank 0 was in a call.)" in found.message_for(0, "a call")  # type: ignore[arg-type]
    assert found.message_for(0, "a call").startswith("rank 2 failed in step 7, so the others end: ")  # type: ignore[arg-type]
