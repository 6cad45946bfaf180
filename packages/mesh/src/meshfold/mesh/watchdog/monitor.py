"""The watchdog: a collective that does not finish ends the job, with a message that names it and the ranks at fault.

A thread in every rank writes to the store in which the ranks met, once a second: the number of this rank's calls in each group,
and where it is. If a call takes longer than the limit, or its connection breaks, the rank finds out which ranks did not arrive
(:mod:`meshfold.mesh.watchdog.diagnosis`). Every rank ends with the findings of the first one.

- Over gloo the call itself ends at the limit and raises :class:`CollectiveError` at its place in the program.
- Over NCCL the host does not wait for a collective. An event after every call shows how far the GPU has come. If the GPU makes no
  progress until the limit, the rank says why and ends its process, since nothing can be raised in a program that waits for its GPU.
- A rank that is not in a collective (it reads data, say) ends ten seconds after the others have found it missing, unless it has
  reached one by then.
- A rank that has failed (:mod:`meshfold.mesh.watchdog.rank_errors`) is not waited for until the limit. Over gloo the other ranks'
  call raises after a few seconds; over NCCL their processes end.

The limit also applies to every process group (for NCCL torch's own limit is a minute later).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from meshfold.mesh.errors import CollectiveError
from meshfold.mesh.processes import groups
from meshfold.mesh.processes.environment import watchdog_settings
from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.recording.flight_recorder import Call, FlightRecorder
from meshfold.mesh.recording.program_line import main_line
from meshfold.mesh.watchdog.consistency import CallComparison
from meshfold.mesh.watchdog.diagnosis import (
    DEFAULT_LIMIT_S,
    Diagnosis,
    awaited_ranks,
    longest_waiting,
    waiting_call,
)
from meshfold.mesh.watchdog.rank_errors import RankErrors

STUCK_CODE = 124
"""The exit code of a process that the watchdog has ended, the same as timeout(1)'s"""

FAILED_CODE = 1
"""The exit code of a process that it has ended because another rank had failed"""

_GRACE_S = 10.0
_STORE_LIMIT = timedelta(seconds=10)


class Watchdog:
    """The watchdog of one process in one world; made by :func:`meshfold.mesh.watchdog.watch`."""

    def __init__(self, rank: int, world_size: int, store: Any, checks: Any) -> None:
        """Args:
        rank, world_size: of this process.
        store, checks: two separate connections to the store, for the thread and for comparing calls.
        """
        self.rank = rank
        self.watches: list[Watch] = []
        self.flight = FlightRecorder(self)
        store.set_timeout(_STORE_LIMIT)
        lock = threading.Lock()
        self._checks, self._agreement = checks, CallComparison(checks, rank)
        self._failures = RankErrors(rank, store, lock, self.flight)
        self._diagnosis = Diagnosis(rank, world_size, store, lock, self.flight, self._failures)
        self._progress = GpuProgress(self.flight)
        self.comparing = False
        self._raising = False
        self._end_at: float | None = None
        self._diagnosis.publish()
        threading.Thread(target=self._run, name="meshfold watchdog", daemon=True).start()
        atexit.register(self._at_exit)

    def set_limit(self, limit_s: float, compare: bool) -> None:
        """Set the limit from now on; the process groups follow."""
        self._diagnosis.limit_s, self.comparing = limit_s, compare
        flight_recorder.limit = timedelta(seconds=limit_s)
        self._checks.set_timeout(flight_recorder.limit)
        groups.limit_groups(flight_recorder.limit)

    # -- what collectives call -------------------------------------------------------------------------------------

    def before(self, call: Call) -> None:
        """Compare a call with the other ranks', if the check is on.

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
        except RuntimeError as error:  # from the store: a rank did not come
            raise self.failed(call, error) from error
        finally:
            self.flight.waiting.pop(id(call), None)

    def announce(self, call: Call) -> None:
        """Publish a call, if calls are compared."""
        if self.comparing:
            self._agreement.announce(call)
            self._agreement.look(call)

    def stays_away(self, call: Call) -> str | None:
        """Return a line about a rank that is known to miss a meeting; None if all may still come."""
        return self._diagnosis.stays_away(call)

    def ended(self, call: Call) -> None:
        """Withdraw this rank's error, if it had one and has continued; done here, where no thread can be late."""
        if self._failures.has_failed:
            with suppress(RuntimeError):  # the store may be gone
                self._failures.withdraw()

    def failed(self, call: Call, error: RuntimeError) -> CollectiveError:
        """Return the error of a call that did not finish."""
        self._raising = True
        found: list[str] = []
        self.flight.waiting[id(call)] = call  # other ranks should still see this rank in this call

        def ask() -> None:
            with suppress(RuntimeError):  # the store has closed; reported below
                found.append(self._cause(call, error))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_STORE_LIMIT.total_seconds() + 5 * self._diagnosis.interval_s)
        self.flight.waiting.pop(id(call), None)
        if found:
            return CollectiveError(found[0])
        return CollectiveError(
            f"{self._diagnosis.what(call, error)}\nNothing is known about the other ranks: the store in which they met does not "
            "answer. The process that serves it is stopped or gone: rank 0, or the launcher's"
        )

    def _cause(self, call: Call, error: RuntimeError | None) -> str:
        """Return why a call does not end. If a rank has failed, those that wait for this one end too."""
        failure = self._diagnosis.failure_behind(call)
        if failure is None:
            return self._diagnosis.verdict(call, error)
        # This rank waits for nobody from now on, so those that wait for it can no longer find the one that failed through it.
        groups.break_off()
        return failure.message_for(self.rank, call)

    def report(self, error: BaseException) -> None:
        """Report this rank's own error, not one that it heard of from others."""
        if not self._raising:
            self._failures.report(error)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._diagnosis.ended:
            time.sleep(self._diagnosis.interval_s)
            if not self.watches:
                continue
            with suppress(RuntimeError):  # the store may have closed: then every rank's next collective fails
                self._diagnosis.publish()
                self._follow_verdict()
                self._stop_waiting_for_failed()
            if not self._raising and (stuck := self._stuck()) is not None:
                with suppress(RuntimeError):
                    self._give_up(self._cause(stuck, None))
                self._give_up(self._diagnosis.what(stuck, None))

    def _follow_verdict(self) -> None:
        """End this process some time after other ranks have ended."""
        text = self._diagnosis.agreed()
        if text is None or self._raising or self._failures.has_failed:
            return
        now = time.monotonic()
        if self._end_at is None:
            self._end_at = now + _GRACE_S
        if now >= self._end_at:
            self._give_up(f"{text}\n(Rank {self.rank} was at {main_line()}.)")

    def _stop_waiting_for_failed(self) -> None:
        """End this rank's wait if it is for a rank that has failed and does not continue."""
        # Leave time for a rank that catches its error to report that it continues.
        long = 2 * self._diagnosis.interval_s
        failures = self._failures.standing_for(long)
        if not failures or self._raising:
            return
        now = time.monotonic()
        call = longest_waiting(self.flight) or self._progress.held_up_by(long)
        if call is None or now - (call.since or now) < long:
            return
        awaited = awaited_ranks(waiting_call(call), self._diagnosis.read(), self.rank)
        failure = next((one for one in failures if one.rank in awaited), None)
        if failure is None:
            return
        if call.event is None:
            groups.break_off()
        else:
            self._give_up(failure.message_for(self.rank, call), FAILED_CODE)

    def _stuck(self) -> Call | None:
        """Return a call that is overdue, or after which the GPU has made no progress."""
        limit, now = self._diagnosis.limit_s, time.monotonic()
        call = longest_waiting(self.flight)
        if call is not None and call.since is not None and now - call.since > limit + _GRACE_S:
            return call
        self._progress.look()
        return self._progress.held_up_by(limit)

    def _give_up(self, text: str, code: int = STUCK_CODE) -> NoReturn:
        sys.stderr.write(f"\nmeshfold watchdog, rank {self.rank}: {text}\n")
        sys.stderr.flush()
        os._exit(code)

    def _at_exit(self) -> None:
        self._diagnosis.ended = True
        with suppress(Exception):  # the store may have closed first
            failed = getattr(sys, "last_value", None)  # the program's last exception
            if isinstance(failed, Exception) and not self._raising:
                self._failures.report(failed, final=True)
            self._diagnosis.publish()


class GpuProgress:
    """The first unfinished call of the queue, and since when it has been the first."""

    def __init__(self, recorder: FlightRecorder) -> None:
        """``recorder``: has the queue of calls, each followed by an event on the GPU."""
        self._flight = recorder
        self._moved = time.monotonic()

    def look(self) -> None:
        """Release the calls that are complete; called periodically."""
        now, queue = time.monotonic(), self._flight.on_device
        while queue and queue[0].event is not None and queue[0].event.query():
            queue.popleft()
            self._moved = now
        if not queue:
            self._moved = now

    def held_up_by(self, seconds: float) -> Call | None:
        """Return the call that had been first in the queue for more than this many seconds at the last check."""
        queue = self._flight.on_device
        return queue[0] if queue and time.monotonic() - self._moved > seconds else None


_running: tuple[Any, Watchdog] | None = None  # (its world, the watchdog)


def watchdog_limit(watchdog: float | None) -> float:
    """Return the seconds that other ranks are waited for: those given, else ``MESHFOLD_WATCHDOG``, else the default.

    Raises:
        LaunchError: for a variable that is no number.
    """
    limit, _ = watchdog_settings()
    if watchdog is not None:
        return watchdog
    return DEFAULT_LIMIT_S if limit is None else limit


class Watch:
    """Handle of a running watchdog; :meth:`close` ends it."""

    def __init__(self, watchdog: Watchdog | None, limit_s: float = DEFAULT_LIMIT_S, compare: bool = False) -> None:
        """Args:
        watchdog: the process's; None if nothing is watched.
        limit_s, compare: see :func:`watch`; they hold until this is closed, or another is made.
        """
        self._watchdog, self._limit_s, self._compare = watchdog, limit_s, compare
        if watchdog is not None:
            watchdog.watches.append(self)
            watchdog.set_limit(limit_s, compare)
            flight_recorder.active = watchdog.flight

    def close(self) -> None:
        """Stop it, unless others use it: then the newest of them counts. May be called twice."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is None:
            return
        watchdog.watches.remove(self)
        if flight_recorder.active is not watchdog.flight:
            return
        if watchdog.watches:
            newest = watchdog.watches[-1]
            watchdog.set_limit(newest._limit_s, newest._compare)
        else:
            flight_recorder.active = flight_recorder.limit = None
            groups.limit_groups(None)


def watch(limit_s: float, *, compare: bool = False) -> Watch:
    """Watch over the collectives of this process from now on; all ranks must call, at the same place of the program.

    Nothing is watched for one rank or in a simulated world. With several in one process the newest one that is open counts.

    Args:
        limit_s: seconds after which a collective that does not finish is an error. 0 for none.
        compare: compare every collective between its ranks before it runs (slow: for finding a fault).
    """
    global _running
    key = groups.world_key()
    if limit_s <= 0 and not compare:
        return Watch(None)
    if _running is None or _running[0] is not key:
        store = groups.own_store()
        if store is None:
            return Watch(None)
        _running = (key, Watchdog(*groups.rank_and_world_size(), store, groups.own_store()))
    return Watch(_running[1], limit_s or DEFAULT_LIMIT_S, compare)
