"""The watchdog: a collective that does not finish ends the job, with a message that says which and whose fault it is.

A thread in every rank tells the others once a second, through the store in which they met, how many calls of each group
this rank has made and where it is. When a call has been waited for as long as the limit, or its connection breaks, the
rank compares: those that have made fewer calls over that group have not arrived. The first rank to see it writes down
what it found, and every rank ends with that.

- Over gloo the call itself gives up at the limit and raises :class:`CollectiveError` where it stands in the program.
- Over NCCL the host does not wait for a collective but for what follows it. There an event behind every call tells how
  far the GPU has come; if it does not come further for the limit, the rank says why and ends its process, since nothing
  can be raised in a program that waits for its GPU.
- A rank that is not in a collective at all (it reads data, say) ends ten seconds after the others have found it
  missing, if it has not come to one by then.
- A rank that has failed (:mod:`meshfold.mesh.failure`) is not waited for until the limit: over gloo the others' call
  raises after a few seconds, over NCCL their processes end.

The limit also becomes that of every process group (torch's own, a minute later, for NCCL).
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from meshfold.mesh import flight, process_group
from meshfold.mesh.agreement import Agreement
from meshfold.mesh.errors import CollectiveError
from meshfold.mesh.failure import Failures
from meshfold.mesh.flight import Call, Flight
from meshfold.mesh.whereabouts import (
    State,
    Waiting,
    behind,
    main_line,
    oldest,
    process_of,
    told,
    waited_for,
    waiting_of,
)

DEFAULT_LIMIT_S = 600.0
STUCK_CODE = 124
"""The exit code of a process that the watchdog has ended, as that of timeout(1)"""

FAILED_CODE = 1
"""That of one that it has ended because another rank had failed"""

_BEAT_S = 1.0
_GRACE_S = 10.0
_KEY, _VERDICT = "meshfold watch/", "meshfold watch/verdict"
_STORE_LIMIT = timedelta(seconds=10)


class Watchdog:
    """Of one process in one world; made by :func:`watch`."""

    def __init__(self, rank: int, world_size: int, store: Any, checks: Any) -> None:
        """Args:
        rank, world_size: of this process.
        store, checks: two connections of their own to the store, for the thread and for comparing calls.
        """
        self.rank, self.world_size = rank, world_size
        self.users = 0
        self.limit_s = DEFAULT_LIMIT_S
        self.flight = Flight(self)
        self._store, self._lock = store, threading.Lock()
        store.set_timeout(_STORE_LIMIT)
        self._checks, self._agreement = checks, Agreement(checks, rank)
        self._failures = Failures(rank, store, self._lock, self.flight)
        self.comparing = False
        self._host, self._beat, self._ended = socket.gethostname(), 0, False
        self._raising = False
        self._condemned: float | None = None
        self._moved = time.monotonic()
        self._publish()
        threading.Thread(target=self._run, name="meshfold watchdog", daemon=True).start()
        atexit.register(self._end)

    def set_limit(self, limit_s: float, compare: bool) -> None:
        """From now on; the process groups follow."""
        self.limit_s, self.comparing = limit_s, compare
        flight.limit = timedelta(seconds=limit_s)
        self._checks.set_timeout(flight.limit)
        process_group.limit_groups(flight.limit)

    # -- what collectives call -------------------------------------------------------------------------------------

    def before(self, call: Call) -> None:
        """Compare a call with the other ranks', if that was asked for.

        Raises:
            CollectiveError: if they do not call the same.
        """
        if not self.comparing or call.checked:
            return
        call.checked = True
        self.flight.waiting[id(call)] = call
        call.since = time.monotonic()
        try:
            self._agreement.compare(call)
        except CollectiveError:
            raise
        except RuntimeError as error:  # the store: somebody did not come
            raise self.failed(call, error) from error
        finally:
            self.flight.waiting.pop(id(call), None)

    def announce(self, call: Call) -> None:
        """Let the others see a call that is made, if calls are compared."""
        if self.comparing:
            self._agreement.announce(call)
            self._agreement.look(call)

    def failed(self, call: Call, error: RuntimeError) -> CollectiveError:
        """What to raise for a call that did not come to its end."""
        self._raising = True
        found: list[str] = []
        self.flight.waiting[id(call)] = (
            call  # it is still what this rank is in, as far as others are concerned
        )
        thread = threading.Thread(target=lambda: found.append(self._verdict(call, error)), daemon=True)
        thread.start()
        thread.join(_STORE_LIMIT.total_seconds() + 5 * self._interval)
        self.flight.waiting.pop(id(call), None)
        if found:
            return CollectiveError(found[0])
        return CollectiveError(
            f"{self._what(call, error)}\nNothing can be said of the other ranks: the store in which they met does not "
            "answer. The process that serves it is stopped or gone: rank 0, or the launcher's"
        )

    def tell(self, error: BaseException) -> None:
        """An error of this rank's own; not what it was told by others."""
        if not self._raising:
            self._failures.tell(error)

    # -- finding out -----------------------------------------------------------------------------------------------

    def _what(self, call: Call, error: Exception | None) -> str:
        step = "" if call.step is None else f" in step {call.step}"
        late = error is None or "imed out" in str(error) or "timeout" in str(error).lower()
        how = f"did not finish in {self.limit_s:g} s" if late else "failed"
        reason = "" if late or error is None else f": {_first_line(error)}"
        return f"{call}{step}, number {call.number} over these ranks, {how}{reason}"

    def _verdict(self, call: Call, error: Exception | None) -> str:
        """Why a call does not end: what the first rank found that looked."""
        with suppress(RuntimeError):
            self._publish()
        failure = self._failures.elsewhere()
        if failure is not None:
            return failure.told(self.rank, call)
        states, how = self._look(waiting_of(call))
        text = f"{self._what(call, error)}\n{self._who(waiting_of(call), states, how)}"
        with self._lock:
            agreed: bytes = self._store.compare_set(_VERDICT, "", text)
        first = agreed.decode()
        return text if first == text else f"{first}\n(Rank {self.rank} was in {call}.)"

    def _who(self, waiting: Waiting, states: dict[int, State], how: dict[int, str]) -> str:
        missing = behind(waiting, states, self.rank)
        causes = waited_for(waiting, states, self.rank)
        lines = [told(rank, states.get(rank), how.get(rank, ""), states) for rank in causes]
        seen = {self.rank, *causes}
        lines += [
            told(rank, states[rank], found, states)
            for rank, found in sorted(how.items())
            if rank not in seen and found in ("gone", "stopped", "silent")
        ]
        if not lines:
            return "All its ranks have called it and live: the connection between them is at fault, or what runs on it"
        head = "Ranks that did not arrive:" if missing else "All its ranks have called it, but:"
        advice = ""
        if all(how.get(rank) not in ("gone", "stopped", "silent") for rank in seen):
            advice = (
                "\nIf a rank may need longer than that, say so: Engine(..., watchdog=SECONDS) or "
                "MESHFOLD_WATCHDOG=SECONDS. If ranks go different ways, MESHFOLD_DEBUG=collectives compares their calls"
            )
        return "\n".join([head, *lines]) + advice

    def _look(self, waiting: Waiting) -> tuple[dict[int, State], dict[int, str]]:
        """All ranks' states, once those that matter are fresh; and how their processes are."""
        first = self._read()
        deadline = time.monotonic() + 2.5 * self._interval
        while True:
            states = self._read()
            how = {rank: process_of(state, self._host) for rank, state in states.items()}
            stale = [
                rank
                for rank in waiting.ranks
                if rank != self.rank
                and how.get(rank, "") in ("", "runs")
                and (rank not in first or states[rank].beat < first[rank].beat + 2)
            ]
            if not stale or time.monotonic() > deadline:
                break
            time.sleep(self._interval / 5)
        for rank in stale:
            if how.get(rank) == "" and rank in first and states[rank].beat == first[rank].beat:
                how[rank] = "silent"
        return states, how

    def _read(self) -> dict[int, State]:
        keys = [f"{_KEY}{rank}" for rank in range(self.world_size)]
        with self._lock:
            if not self._store.check(keys):
                keys = [key for key in keys if self._store.check([key])]
            found = self._store.multi_get(keys)
        return {int(key.removeprefix(_KEY)): State.read(text) for key, text in zip(keys, found, strict=True)}

    # -- the thread ------------------------------------------------------------------------------------------------

    @property
    def _interval(self) -> float:
        return min(_BEAT_S, self.limit_s / 4)

    def _publish(self) -> None:
        self._beat += 1
        state = State.of(self.flight, self._beat, self._host, ended=self._ended)
        with self._lock:
            self._store.set(f"{_KEY}{self.rank}", state.written())

    def _run(self) -> None:
        while not self._ended:
            time.sleep(self._interval)
            if not self.users:
                continue
            with suppress(RuntimeError):  # the store may be gone: then every rank's next collective fails
                self._publish()
                self._failures.renew()
                self._heed()
                self._wait_no_longer()
            if not self._raising and (stuck := self._stuck()) is not None:
                with suppress(RuntimeError):
                    self._give_up(self._verdict(stuck, None))
                self._give_up(self._what(stuck, None))

    def _heed(self) -> None:
        """End this process some time after others have ended theirs."""
        with self._lock:
            there = self._store.check([_VERDICT])
        if not there or self._raising or self._failures.stands:
            return
        now = time.monotonic()
        if self._condemned is None:
            self._condemned = now + _GRACE_S
        if now >= self._condemned:
            with self._lock:
                text = self._store.get(_VERDICT).decode()
            self._give_up(f"{text}\n(Rank {self.rank} was at {main_line()}.)")

    def _wait_no_longer(self) -> None:
        """End what this rank waits in, if that is for one that has failed and does not go on."""
        long = 2 * self._interval  # a rank that catches its error and goes on has the time to say so
        failure = self._failures.lasting(long)
        if failure is None or self._raising:
            return
        now = time.monotonic()
        call = oldest(self.flight)
        if call is None and self.flight.on_device and now - self._moved > long:
            call = self.flight.on_device[0]
        if call is None or now - (call.since or now) < long:
            return
        if failure.rank not in waited_for(waiting_of(call), self._read(), self.rank):
            return
        if call.event is None:
            process_group.break_off()
        else:
            self._give_up(failure.told(self.rank, call), FAILED_CODE)

    def _stuck(self) -> Call | None:
        """A call that should have ended long ago, or behind which the GPU has not come further."""
        now = time.monotonic()
        call = oldest(self.flight)
        if call is not None and call.since is not None and now - call.since > self.limit_s + _GRACE_S:
            return call
        queue = self.flight.on_device
        while queue and queue[0].event is not None and queue[0].event.query():
            queue.popleft()
            self._moved = now
        if not queue:
            self._moved = now
        return queue[0] if queue and now - self._moved > self.limit_s else None

    def _give_up(self, text: str, code: int = STUCK_CODE) -> NoReturn:
        sys.stderr.write(f"\nmeshfold watchdog, rank {self.rank}: {text}\n")
        sys.stderr.flush()
        os._exit(code)

    def _end(self) -> None:
        self._ended = True
        with suppress(Exception):  # the store may have ended first
            failed = getattr(sys, "last_value", None)  # what the program ends with
            if isinstance(failed, Exception):
                self.tell(failed)
            self._publish()


_running: tuple[Any, Watchdog] | None = None  # and the world it is of


class Watch:
    """What :func:`watch` gives; :meth:`close` it to watch no more."""

    def __init__(self, dog: Watchdog | None) -> None:
        self._dog = dog

    def close(self) -> None:
        """May be called twice."""
        dog, self._dog = self._dog, None
        if dog is None:
            return
        dog.users -= 1
        if dog.users == 0 and flight.active is dog.flight:
            flight.active = flight.limit = None
            process_group.limit_groups(None)


def watch(limit_s: float, *, compare: bool = False) -> Watch:
    """Watch over the collectives of this process from now on; all ranks must call, at the same place of the program.

    Alone, or in a world that is not there, nothing is watched. Of several in one process the newest limit counts.

    Args:
        limit_s: seconds after which a collective that does not finish is an error. 0 for none.
        compare: compare every collective between its ranks before it runs (slow: for finding a fault).
    """
    global _running
    key = process_group.world_key()
    if limit_s <= 0 and not compare:
        return Watch(None)
    if _running is None or _running[0] is not key:
        store = process_group.own_store()
        if store is None:
            return Watch(None)
        _running = (key, Watchdog(*process_group.place(), store, process_group.own_store()))
    dog = _running[1]
    dog.users += 1
    dog.set_limit(limit_s or DEFAULT_LIMIT_S, compare)
    flight.active = dog.flight
    return Watch(dog)


def _first_line(error: Exception) -> str:
    """What gloo or NCCL says, without the line of its source and advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0]
