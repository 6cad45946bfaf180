"""The flight recorder: which collectives this rank has called, counted per group, and which of them it waits for.

It is what the watchdog (:mod:`meshfold.mesh.watchdog.monitor`) reads when something hangs, and costs about a microsecond a
collective, and a fifth of one without a watchdog. Calls are counted in the order of the program. Ranks that run the same program
have the same numbers: a rank with a lower count has not arrived. Inside a graph of torch.compile calls are not counted one by one,
on no rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from meshfold.mesh.errors import LaunchError, MeshfoldError
from meshfold.mesh.group import Group

_KEPT = 16  # calls
_ON_DEVICE = 1024  # calls whose completion on a GPU is tracked


class Watcher(Protocol):
    """Observer of the calls."""

    def announce(self, call: Call) -> None:
        """Record a call that is about to be made."""

    def stays_away(self, call: Call) -> str | None:
        """Return a line about a rank that is known to miss a rendezvous."""

    def before(self, call: Call) -> None:
        """Record that a call is waited for from now on."""

    def ended(self, call: Call) -> None:
        """Record that a call that was waited for is complete."""

    def failed(self, call: Call, error: RuntimeError) -> Exception:
        """Return what to raise for a call that failed."""

    def report(self, error: BaseException) -> None:
        """Report an error of this rank to the others."""


class Call:
    """One collective of this rank; a context manager around waiting for it.

    Attributes:
        kind: name of the operation.
        group: the ranks it runs over.
        channel: calls counted together: of the group, or of one direction between two of its ranks.
        number: of this call on its channel, from 1.
        shape, dtype: of the tensor handed over.
        detail: what else the ranks must agree on: the operation, the dims, the source.
        step: the optimizer step it belongs to; None if unknown.
        peer: the other rank of a send or a receive.
        is_meeting: it is no collective: the ranks meet in the store.
        since: when waiting began, in seconds of ``time.monotonic()``; None while not waiting.
        checked: whether the ranks' calls were compared.
    """

    __slots__ = (
        "_flight",
        "channel",
        "checked",
        "detail",
        "dtype",
        "event",
        "group",
        "is_meeting",
        "kind",
        "number",
        "peer",
        "shape",
        "since",
        "step",
    )

    def __init__(
        self,
        flight: FlightRecorder,
        kind: str,
        group: Group,
        x: Tensor,
        detail: object,
        peer: int | None,
        *,
        is_meeting: bool = False,
    ) -> None:
        self._flight, self.kind, self.group, self.detail, self.peer = flight, kind, group, detail, peer
        self.shape, self.dtype, self.step = x.shape, x.dtype, flight.step
        self.is_meeting = is_meeting
        self.channel = f"{kind} {group.name}" if is_meeting else group.name
        if peer is not None:
            me = group.ranks[group.index]
            source, target = (me, peer) if kind == "send" else (peer, me)
            self.channel = f"{group.name} {source}>{target}"
        before = flight.counts.get(self.channel, 0)
        if not before:
            flight.members[self.channel] = group.ranks if peer is None else (source, target)
        self.number = flight.counts[self.channel] = before + 1
        self.since: float | None = None
        self.checked = False
        self.event: torch.cuda.Event | None = None
        if x.is_cuda:
            self.event = torch.cuda.Event()

    def __enter__(self) -> None:
        self._flight.waiting[id(self)] = self
        self.since = time.monotonic()  # set last: a call with a time that is not in ``waiting`` has ended
        if not self.checked:
            self._flight.watcher.before(self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._flight.waiting.pop(id(self), None)
        if error is not None:
            if isinstance(error, RuntimeError) and not isinstance(error, MeshfoldError):
                raise self.failed(error) from None
            return
        if self.event is not None and not torch.cuda.is_current_stream_capturing():
            self.event.record()  # the host has not waited, only the stream
            self._flight.on_device.append(self)
        self._flight.watcher.ended(self)

    def stays_away(self) -> str | None:
        """Return a line about a rank that is known to miss a rendezvous; None if all may still come."""
        return self._flight.watcher.stays_away(self)

    def failed(self, error: RuntimeError) -> Exception:
        """Return the error to raise instead of torch's."""
        return self._flight.watcher.failed(self, error)

    def __str__(self) -> str:
        """``all_reduce of (4, 8) float32 over row, col (ranks 0, 1, 2, 3)``."""
        if self.is_meeting:
            return f"{self.kind} of ranks {shortened(self.group.ranks)}"
        dtype = str(self.dtype).removeprefix("torch.")
        if self.peer is not None:
            towards = "to" if self.kind == "send" else "from"
            what = f"{self.kind} of {tuple(self.shape)} {dtype} {towards} rank {self.peer}"
        else:
            what = f"{self.kind} of {tuple(self.shape)} {dtype}"
        return f"{what} over {', '.join(self.group.axes)} (ranks {shortened(self.group.ranks)})"


class FlightRecorder:
    """The calls of this rank so far.

    Attributes:
        watcher: looks at them.
        step: the optimizer step; None if unknown.
        counts: of calls, by channel.
        members: the ranks of each channel.
        last: the newest calls.
        waiting: those that are waited for.
        on_device: those whose end on a GPU was not seen yet.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.step: int | None = None
        self.counts: dict[str, int] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.last: deque[Call] = deque(maxlen=_KEPT)
        self.waiting: dict[int, Call] = {}
        self.on_device: deque[Call] = deque(maxlen=_ON_DEVICE)

    def enter(self, kind: str, group: Group, x: Tensor, detail: object, peer: int | None, now: bool) -> Call:
        """Record a call; ``now``: the caller waits for it immediately."""
        call = Call(self, kind, group, x, detail, peer)
        self.last.append(call)
        self.watcher.announce(call)
        if now:
            self.watcher.before(call)
        return call

    def meeting(self, kind: str, group: Group) -> Call:
        """Note that this rank waits for others in the store."""
        call = Call(self, kind, group, torch.empty(0), None, None, is_meeting=True)
        call.checked = True  # no arguments to compare
        return call


#: The running watchdog's recorder; None without a watchdog.
active: FlightRecorder | None = None

#: Timeout of a message between two ranks under a watchdog.
limit: timedelta | None = None


@contextmanager
def meeting(kind: str, ranks: Sequence[int], rank: int, name: str) -> Iterator[Call | None]:
    """Report that this rank waits in the store for these, if a watchdog runs.

    Args:
        kind: purpose of the meeting.
        ranks: global ranks that meet.
        rank: this one.
        name: of the meeting.

    Raises:
        LaunchError: for a RuntimeError inside; the watchdog's error if one runs.
    """
    if active is not None:
        group = Group(axes=(), ranks=tuple(ranks), index=list(ranks).index(rank), name=name)
        with (call := active.meeting(kind, group)):
            yield call
        return
    try:
        yield None
    except RuntimeError as error:
        if isinstance(error, MeshfoldError):
            raise
        raise LaunchError(f"{kind} of ranks {shortened(tuple(ranks))} failed: {error}") from error


def at_step(step: int) -> None:
    """Set the optimizer step that the following collectives belong to."""
    if active is not None:
        active.step = step


def shortened(ranks: tuple[int, ...]) -> str:
    """Return ranks as text: ``0, 1, 2``, or ``0, 1, 2, ... 63: 64 ranks``."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))}, ... {ranks[-1]}: {len(ranks)} ranks"
