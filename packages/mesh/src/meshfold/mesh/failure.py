"""An error on one rank alone: the others hear of it, and do not wait for that rank until the watchdog's limit.

The rank leaves its error in the store in which all met. Whoever waits for it, directly or through others, finds it there
and ends with it (:mod:`meshfold.mesh.watchdog` looks once a second). Two kinds of errors are no reason to end:

- one that all ranks raise alike, and may catch: whoever has raised as many itself does not heed it;
- one after which the rank goes on: it takes its error back once a later collective has ended.
"""

from __future__ import annotations

import functools
import json
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec, TypeVar

from meshfold.mesh import flight
from meshfold.mesh.flight import Call, Flight
from meshfold.mesh.whereabouts import main_line

_KEY = "meshfold watch/failure"
_LONGEST = 20_000  # characters of a traceback
_TOLD = "_meshfold_told"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error of one rank.

    Attributes:
        rank: whose.
        number: how many it has had in this world, from 1.
        step: the optimizer step it was in; None if nobody said.
        line: of the user's program that called the library.
        error: its type and message.
        traceback: from there on.
    """

    rank: int
    number: int
    step: int | None
    line: str
    error: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, rank: int, number: int, step: int | None) -> Failure:
        """What a rank says of an error."""
        first = error.__traceback__
        if first is not None and first.tb_frame.f_code.co_filename == __file__:
            first = first.tb_next
        text = "".join(traceback.format_exception(type(error), error, first))
        if len(text) > _LONGEST:  # its end says what, the last frames say where
            text = f"...\n{text[-_LONGEST:]}"
        words = f"{type(error).__name__}: {error}".removesuffix(": ")
        return cls(rank=rank, number=number, step=step, line=main_line(), error=words, traceback=text)

    def written(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> Failure:
        """The way back."""
        return cls(**json.loads(text))

    def told(self, rank: int, call: Call) -> str:
        """What another rank says that was waiting."""
        step = "" if self.step is None else f" in step {self.step}"
        return (
            f"rank {self.rank} failed{step}, so the others end: {self.error}\n"
            f"On rank {self.rank}, at {self.line}:\n{self.traceback}(Rank {rank} was in {call}.)"
        )


class Failures:
    """What one rank says of its errors, and hears of the others'."""

    def __init__(self, rank: int, store: Any, lock: threading.Lock, recorder: Flight) -> None:
        """Args:
        rank: this one.
        store, lock: a connection to the store, and what to hold while it is used.
        recorder: of this rank's calls.
        """
        self._rank, self._store, self._lock, self._flight = rank, store, lock, recorder
        self._count = 0
        self._own: tuple[str, Call | None] | None = None  # as written, and the last call before it
        self._heard: Failure | None = None
        self._since = 0.0

    def tell(self, error: BaseException) -> None:
        """Let the others know of an error that leaves the library, once."""
        if getattr(error, _TOLD, False):
            return
        with suppress(AttributeError):  # an exception class with slots
            setattr(error, _TOLD, True)
        self._count += 1
        words = Failure.of(error, self._rank, self._count, self._flight.step).written()
        self._own = words, self._last()
        with suppress(RuntimeError):  # without a store the others' connections break
            self._say(words)

    @property
    def stands(self) -> bool:
        """Whether this rank has failed, and not gone on."""
        return self._own is not None

    def renew(self) -> None:
        """Say again that this rank has failed, if another's error stood there; or take it back, if it has gone on."""
        own = self._own
        if own is None:
            return
        words, before = own
        last = self._last()
        went_on = (
            last is not None and last is not before and last.since is not None and not self._flight.waiting
        )
        self._say("" if went_on else words)
        if went_on and self._own is own:  # the program's thread may have told another since
            self._own = None

    def elsewhere(self) -> Failure | None:
        """The error of another rank that this one has not had."""
        with self._lock:
            held = self._store.get(_KEY) if self._store.check([_KEY]) else b""
        if not held:
            return None
        found = Failure.read(held)
        return found if found.rank != self._rank and found.number > self._count else None

    def lasting(self, seconds: float) -> Failure | None:
        """The same, once it has stood for so long; to be asked again and again."""
        found, now = self.elsewhere(), time.monotonic()
        if found != self._heard:
            self._heard, self._since = found, now
        return found if now - self._since >= seconds else None

    def _say(self, words: str) -> None:
        """Write it where nothing stands, or something of this rank's own."""
        with self._lock:
            held = self._store.compare_set(_KEY, "", words).decode()
            if held not in ("", words) and Failure.read(held).rank == self._rank:
                self._store.compare_set(_KEY, held, words)

    def _last(self) -> Call | None:
        return self._flight.last[-1] if self._flight.last else None


def told_to_all(function: Callable[P, R]) -> Callable[P, R]:
    """A function that all ranks call: an error that leaves it is told to the other ranks, where somebody watches."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if flight.active is not None:
                flight.active.watcher.tell(error)
            raise

    return called
