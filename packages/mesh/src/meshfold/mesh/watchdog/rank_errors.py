"""Errors on one rank: the others learn of them, and do not wait for that rank until the watchdog's limit.

The rank leaves its error in the store in which all met, under a key of its own. Ranks that wait for it, directly or through others,
find it there and end with it (:mod:`meshfold.mesh.watchdog` looks once a second). Two kinds of errors are no reason to end:

- one that all ranks raise, and may catch. The optimizer step and the calls made until then identify its place in the program. A
  rank that has had equally many errors of that type there ignores it. Errors that a rank had elsewhere, or of other types, do not
  count.
- one after which the rank continues: it withdraws its error as soon as a later collective has ended, before it does anything else.

An error that ended its rank's program always counts: that rank does not continue.
"""

from __future__ import annotations

import functools
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, ParamSpec, TypeVar

from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.recording.flight_recorder import Call, FlightRecorder
from meshfold.mesh.recording.program_line import main_line, raised_at

_KEY = "meshfold watch/failure "  # followed by the rank
_WHO = "meshfold watch/failed"  # ranks that had an error
_ORDER = "meshfold watch/failures"  # total number of errors
_REMEMBERED = 64  # error locations of this rank
_LONGEST = 20_000  # characters of a traceback
_REPORTED = "_meshfold_reported"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorLocation:
    """Location in the program where an error was raised, as far as ranks that run the same program can compare it.

    Attributes:
        kind: the error's type.
        step: the optimizer step; None if unknown.
        counts: calls made until then, by channel.
    """

    kind: str
    step: int | None
    counts: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, error: BaseException, recorder: FlightRecorder) -> ErrorLocation:
        """Return the location of an error that this rank has now."""
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        return cls(kind=kind, step=recorder.step, counts=tuple(recorder.counts.items()))

    @classmethod
    def from_json(cls, words: dict[str, Any]) -> ErrorLocation:
        """Return the location from its JSON."""
        return cls(kind=words["kind"], step=words["step"], counts=tuple((name, n) for name, n in words["counts"]))

    def matches(self, other: ErrorLocation, shared: Iterable[str]) -> bool:
        """Return True if it is another rank's location too; ``shared``: the channels over which both ranks call."""
        mine, theirs = dict(self.counts), dict(other.counts)
        return (self.kind, self.step) == (other.kind, other.step) and all(
            mine.get(channel, 0) == theirs.get(channel, 0) for channel in shared
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error of one rank.

    Attributes:
        rank: whose.
        order: its place among the errors of all ranks, from 1.
        location: where it was raised.
        number: how many of its kind its rank has had at that place, from 1.
        final: it has ended its rank's program.
        line: of the user's program that called the library.
        error: its type and message.
        traceback: from there on.
    """

    rank: int
    order: int
    location: ErrorLocation
    number: int
    final: bool
    line: str
    error: str
    traceback: str

    @classmethod
    def of(
        cls,
        error: BaseException,
        rank: int,
        location: ErrorLocation,
        *,
        order: int = 1,
        number: int = 1,
        final: bool = False,
    ) -> Failure:
        """Return the report of an error."""
        first = error.__traceback__
        if first is not None and first.tb_frame.f_code.co_filename == __file__:
            first = first.tb_next
        text = "".join(traceback.format_exception(type(error), error, first))
        if len(text) > _LONGEST:  # keep the end: the message and the last frames
            text = f"...\n{text[-_LONGEST:]}"
        words = f"{type(error).__name__}: {error}".removesuffix(": ")
        line = raised_at(error) if final else main_line()
        return cls(
            rank=rank,
            order=order,
            location=location,
            number=number,
            final=final,
            line=line,
            error=words,
            traceback=text,
        )

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Read the result of :meth:`to_json`."""
        words: dict[str, Any] = json.loads(text)
        return cls(**{**words, "location": ErrorLocation.from_json(words["location"])})

    def message_for(self, rank: int, call: Call) -> str:
        """Return the message of another rank that was waiting."""
        step = "" if self.location.step is None else f" in step {self.location.step}"
        return (
            f"rank {self.rank} failed{step}, so the others end: {self.error}\n"
            f"On rank {self.rank}, at {self.line}:\n{self.traceback}(Rank {rank} was in {call}.)"
        )


class RankErrors:
    """Errors that one rank reports, and those that it hears of from others."""

    def __init__(self, rank: int, store: Any, lock: threading.Lock, recorder: FlightRecorder) -> None:
        """Args:
        rank: this one.
        store, lock: a connection to the store, and the lock to hold while using it.
        recorder: of this rank's calls.
        """
        self._rank, self._store, self._lock, self._flight = rank, store, lock, recorder
        self._key = f"{_KEY}{rank}"
        self._seen: dict[ErrorLocation, int] = {}  # number of errors at the newest locations
        self._own: tuple[Failure, Call | None] | None = None  # with the last call before it
        self._since: dict[tuple[int, int], float] = {}  # time of each failure by (rank, order)

    def report(self, error: BaseException, *, final: bool = False) -> None:
        """Report an error that leaves the library to the others, once; and again if it is ``final``."""
        if getattr(error, _REPORTED, False) and not final:
            return
        with suppress(AttributeError):  # an exception with __slots__
            setattr(error, _REPORTED, True)
        location, last = ErrorLocation.of(error, self._flight), self._last()
        number = self._seen[location] = self._seen.pop(location, 0) + 1
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        failure = Failure.of(error, self._rank, location, number=number, final=final)
        self._own = failure, last
        with suppress(RuntimeError):  # without a store the others notice broken connections
            with self._lock:
                failure = replace(failure, order=self._store.add(_ORDER, 1))
            self._own = failure, last
            self._publish(failure)

    @property
    def has_failed(self) -> bool:
        """True if this rank has failed and not continued."""
        return self._own is not None

    def withdraw(self) -> None:
        """Withdraw this rank's error, if it has continued."""
        own = self._own
        if own is None or own[0].final:
            return
        failure, before = own
        calls = list(self._flight.last)
        later = calls[calls.index(before) + 1 :] if before in calls else calls
        if not any(call.since is not None and id(call) not in self._flight.waiting for call in later):
            return
        with self._lock:
            self._store.compare_set(self._key, failure.to_json(), "")  # unless a newer error was reported
        if self._own is own:
            self._own = None

    def from_other_ranks(self) -> list[Failure]:
        """Return the errors of other ranks that this one has not had, the first one first.

        If no rank has ever failed, this is a single query of the store.
        """
        with self._lock:
            if not self._store.check([_WHO]):
                return []
            ranks = json.loads(self._store.get(_WHO))
            keys = [f"{_KEY}{rank}" for rank in ranks if rank != self._rank]
            held = self._store.multi_get(keys) if keys else []
        found = [Failure.from_json(text) for text in held if text]
        return sorted((one for one in found if self._concerns(one)), key=lambda one: one.order)

    def standing_for(self, seconds: float) -> list[Failure]:
        """Return those of them that have lasted this long; to be polled."""
        found, now = self.from_other_ranks(), time.monotonic()
        self._since = {(one.rank, one.order): self._since.get((one.rank, one.order), now) for one in found}
        return [one for one in found if now - self._since[one.rank, one.order] >= seconds]

    def _concerns(self, failure: Failure) -> bool:
        shared = [channel for channel, ranks in list(self._flight.members.items()) if failure.rank in ranks]
        had = list(self._seen.items())
        alike = [number for location, number in had if location.matches(failure.location, shared)]
        return failure.final or failure.number > max(alike, default=0)

    def _publish(self, failure: Failure) -> None:
        """Publish the failure, then add this rank to those that have failed."""
        with self._lock:
            self._store.set(self._key, failure.to_json())
            wanted, held = [self._rank], ""
            while True:
                now = self._store.compare_set(_WHO, held, json.dumps(wanted)).decode()
                if now == json.dumps(wanted):
                    return
                held = now
                ranks = json.loads(held)
                if self._rank in ranks:
                    return
                wanted = [*ranks, self._rank]

    def _last(self) -> Call | None:
        return self._flight.last[-1] if self._flight.last else None


def report_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that all ranks call: an error that leaves it is reported to the other ranks, where a watchdog runs."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if flight_recorder.active is not None:
                flight_recorder.active.watcher.report(error)
            raise

    return called
