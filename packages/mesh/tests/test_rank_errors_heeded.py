"""Whose errors are heeded: those that one has not had oneself at that place of the program. Several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from meshfold.mesh.group import Group
from meshfold.mesh.recording.flight_recorder import Call, FlightRecorder
from meshfold.mesh.watchdog.rank_errors import _REMEMBERED, RankErrors


class Memory:
    """Stands for the store in which ranks meet; counts what it is asked."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.asked = 0

    def set(self, key: str, text: str) -> None:
        self.asked += 1
        self.held[key] = text.encode()

    def get(self, key: str) -> bytes:
        self.asked += 1
        return self.held[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked += 1
        assert keys, "a store is not asked for nothing"
        return [self.held[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return all(key in self.held for key in keys)

    def add(self, key: str, number: int) -> int:
        self.asked += 1
        self.held[key] = str(int(self.held.get(key, b"0")) + number).encode()
        return int(self.held[key])

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """As torch's: a key that is not there is set if "" was expected."""
        self.asked += 1
        if self.held.get(key, b"") == expected.encode():
            self.held[key] = wanted.encode()
        return self.held.get(key, expected.encode())


class Rank:
    """One that has errors, makes calls, and hears of others."""

    def __init__(self, rank: int, store: Memory) -> None:
        self.rank = rank
        self.flight = FlightRecorder(self)
        self.failures = RankErrors(rank, store, threading.Lock(), self.flight)

    def calls(self, *, over: str = "everyone", comes_to_its_end: bool = True) -> None:
        ranks, place = ((0, 1, 2), self.rank) if over == "everyone" else ((self.rank,), 0)
        group = Group(axes=("data",), ranks=ranks, index=place, name=over)
        call = Call(self.flight, "all_reduce", group, torch.ones(1), "sum", None)
        self.flight.last.append(call)
        call.__enter__()
        if comes_to_its_end:
            call.__exit__(None, None, None)

    def fails(self, error: Exception | None = None, *, final: bool = False) -> Exception:
        error = error or ValueError("wrong")
        self.failures.report(error, final=final)
        return error

    def hears(self) -> list[int]:
        """Whose errors it heeds, the first one first."""
        return [found.rank for found in self.failures.from_other_ranks()]

    # -- a watcher has these

    def announce(self, call: Call) -> None: ...
    def before(self, call: Call) -> None: ...
    def report(self, error: BaseException) -> None: ...
    def ended(self, call: Call) -> None: ...
    def failed(self, call: Call, error: RuntimeError) -> Exception:
        return error


@pytest.fixture
def store() -> Memory:
    return Memory()


@pytest.fixture
def three(store: Memory) -> tuple[Rank, Rank, Rank]:
    return Rank(0, store), Rank(1, store), Rank(2, store)


Three = tuple[Rank, Rank, Rank]


def before_a_call(one: Rank, other: Rank) -> None:
    one.fails()
    one.fails()
    one.calls()
    other.calls()


def in_another_step(one: Rank, other: Rank) -> None:
    one.flight.step = 1
    one.fails()
    one.flight.step = other.flight.step = 2


def of_another_type(one: Rank, other: Rank) -> None:
    one.fails(KeyError("absent"))
    one.fails(KeyError("absent"))


@pytest.mark.parametrize("own", [before_a_call, in_another_step, of_another_type])
def test_errors_of_ones_own_elsewhere_do_not_count(own: Callable[[Rank, Rank], None], three: Three) -> None:
    one, other, third = three
    own(one, other)
    assert one.hears() == []
    other.fails()
    assert one.hears() == [1]
    assert 1 in third.hears()


def test_an_error_that_one_has_had_at_that_place_is_not_heeded(three: Three) -> None:
    one, other, third = three
    for rank in three:
        rank.calls()
        rank.flight.step = 3
    third.calls(over="its own")  # of which the others know nothing
    one.calls(over="its own, too")
    for rank in three:
        rank.fails()
    one.calls(comes_to_its_end=False)  # and waits for the others
    assert one.hears() == other.hears() == third.hears() == []
    other.fails()  # one more than the others have had there
    assert one.hears() == third.hears() == [1]
    third.fails()
    assert one.hears() == [1, 2] and third.hears() == []


def test_as_many_as_one_has_had_are_not_heeded_however_many(three: Three) -> None:
    one, other, _ = three
    for _ in range(2 * _REMEMBERED):
        one.fails()
        other.fails()
    assert one.hears() == other.hears() == []
    for _ in range(2 * _REMEMBERED):  # places that are forgotten one day
        one.calls()
        one.fails()
    assert len(one.failures._seen) == _REMEMBERED


def test_an_error_that_ended_its_program_is_heeded_whoever_has_had_it(three: Three) -> None:
    one, other, _ = three
    for _ in range(3):
        one.fails()
    error = other.fails()
    other.fails(error)  # told once
    assert one.hears() == []
    other.fails(error, final=True)
    assert one.hears() == [1]
    other.calls()
    other.failures.withdraw()  # it goes on nowhere
    assert one.hears() == [1]


def test_an_error_that_all_have_hides_no_other(three: Three) -> None:
    one, other, third = three
    one.fails()
    other.fails()  # it stands, since it has to do something else first
    for rank in three:
        rank.calls()
    third.fails()
    assert one.hears() == other.hears() == [2]


def test_the_first_error_comes_first(three: Three) -> None:
    one, other, third = three
    third.fails()
    other.fails(KeyError("a consequence"))
    assert one.hears() == [2, 1]
    third.calls()
    third.failures.withdraw()
    assert one.hears() == [1]
    third.fails(KeyError("another"))
    assert one.hears() == [1, 2]


def test_who_goes_on_takes_its_error_back(three: Three) -> None:
    one, other, _ = three
    other.fails()
    other.calls(comes_to_its_end=False)  # cleaning up, perhaps
    other.failures.withdraw()
    assert one.hears() == [1] and other.failures.has_failed
    other.flight.waiting.clear()
    other.calls(comes_to_its_end=False)  # the one before has ended
    other.failures.withdraw()
    assert one.hears() == [] and not other.failures.has_failed
    other.fails()
    for _ in range(20):  # more than are remembered
        other.calls()
    other.failures.withdraw()
    assert one.hears() == []


def test_how_long_an_error_stands_is_counted_from_its_beginning(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.mesh.watchdog import rank_errors as module

    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    one, other, third = three
    other.fails()
    assert one.failures.standing_for(2.0) == []
    now[0] += 1.5
    third.fails()
    assert one.failures.standing_for(2.0) == []
    now[0] += 1.0
    assert [found.rank for found in one.failures.standing_for(2.0)] == [1]
    other.fails()  # a new one
    now[0] += 1.0
    assert [found.rank for found in one.failures.standing_for(2.0)] == [2]


def test_where_nobody_fails_the_store_is_asked_once(three: Three, store: Memory) -> None:
    assert three[0].failures.standing_for(2.0) == [] and store.asked == 1
    three[1].failures.withdraw()
    assert store.asked == 1
