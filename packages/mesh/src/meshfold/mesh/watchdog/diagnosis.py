"""The diagnosis of a call that does not end, from the states that ranks exchange through the store.

Once a second each rank leaves its :class:`RankStatus` there. When a call does not end, a rank compares: those that have made fewer
calls over that group have not arrived. The first rank to look writes its verdict, and the others end with it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from meshfold.mesh.processes.rendezvous import process_state
from meshfold.mesh.recording.flight_recorder import Call, FlightRecorder, shortened
from meshfold.mesh.recording.program_line import main_line
from meshfold.mesh.watchdog.rank_errors import Failure, RankErrors

DEFAULT_LIMIT_S = 600.0

_BEAT_S = 1.0
_KEY, _VERDICT = "meshfold watch/", "meshfold watch/verdict"


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A call that a rank waits for."""

    channel: str
    number: int
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """Status that a rank reports.

    Attributes:
        beat: grows with every message, so reading it twice shows if the rank is alive.
        host, pid: of its process.
        step: the optimizer step it is in.
        line: of the user's program, in the main thread.
        ended: whether the program has come to its end.
        counts: calls so far, by channel.
        last: its last call.
        waiting: the call that it has waited for longest.
    """

    beat: int
    host: str
    pid: int
    step: int | None
    line: str
    ended: bool
    counts: dict[str, int] = field(default_factory=dict)
    last: str = ""
    waiting: Waiting | None = None

    @classmethod
    def of(cls, flight: FlightRecorder, beat: int, host: str, *, ended: bool) -> RankStatus:
        """Return this rank's status."""
        longest = longest_waiting(flight)
        return cls(
            beat=beat,
            host=host,
            pid=os.getpid(),
            step=flight.step,
            line=main_line(),
            ended=ended,
            counts=dict(flight.counts),
            last=str(flight.last[-1]) if flight.last else "",
            waiting=None if longest is None else waiting_call(longest),
        )

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        """Read the result of :meth:`to_json`."""
        words: dict[str, Any] = json.loads(text)
        if words["waiting"] is not None:
            words["waiting"]["ranks"] = tuple(words["waiting"]["ranks"])
            words["waiting"] = Waiting(**words["waiting"])
        return cls(**words)


def longest_waiting(flight: FlightRecorder) -> Call | None:
    """Return the call that has been waited for longest."""
    waiting = [call for call in list(flight.waiting.values()) if call.since is not None]
    return min(waiting, key=lambda call: call.since or 0.0, default=None)


def waiting_call(call: Call) -> Waiting:
    """Return a call as others see it; of a message, the other side."""
    ranks = call.group.ranks if call.peer is None else (call.peer,)
    return Waiting(channel=call.channel, number=call.number, ranks=ranks, text=str(call))


def ranks_behind(waiting: Waiting, states: dict[int, RankStatus], me: int) -> list[int]:
    """Return the ranks that have not made a call that is waited for."""
    return [
        rank
        for rank in waiting.ranks
        if rank != me and (rank not in states or states[rank].counts.get(waiting.channel, 0) < waiting.number)
    ]


def awaited_ranks(waiting: Waiting, states: dict[int, RankStatus], me: int) -> list[int]:
    """Return the ranks that a call waits for, then the ranks that these wait for, and so on. A rank that waits is not the
    cause."""
    found = ranks_behind(waiting, states, me)
    for rank in found:  # the list grows while it is read
        state = states.get(rank)
        if state is not None and state.waiting is not None:
            found += [one for one in ranks_behind(state.waiting, states, me) if one not in found]
    return found


def describe_rank(rank: int, state: RankStatus | None, how: str, states: dict[int, RankStatus]) -> str:
    """Return a line about a rank. ``how``: see :func:`process_state`, or ``silent``."""
    if state is None:
        return f"  rank {rank}: it never reported: it has not reached its first collective"
    where = f"process {state.pid} on {state.host}"
    what = {
        "gone": f"{where} is gone",
        "stopped": f"{where} is stopped (by SIGSTOP or a debugger)",
        "silent": f"{where} does not respond",
    }.get(how, f"{where} runs")
    parts = [what]
    if state.ended and how != "gone":
        parts.append("its program has ended")
    if state.step is not None:
        parts.append(f"in step {state.step}")
    if state.ended:
        return f"  rank {rank}: {', '.join(parts)}"
    if state.waiting is not None and how in ("runs", ""):
        for_whom = ranks_behind(state.waiting, states, rank)
        who = f", for rank{'s'[: len(for_whom) > 1]} {shortened(tuple(for_whom))}" if for_whom else ""
        parts.append(f"it waits in {state.waiting.text}{who}")
    else:
        when = "" if how in ("runs", "") else "when last heard of "
        parts.append(f"{when}at {state.line}")
        if state.last:
            parts.append(f"its last collective {'was' if not when else 'then was'} {state.last}")
    return f"  rank {rank}: {', '.join(parts)}"


class Diagnosis:
    """The status messages of one rank, and its diagnosis of a call that does not end.

    Attributes:
        rank, world_size: of this process.
        limit_s: how long a call may take.
        ended: whether this rank's program has come to its end.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        lock: threading.Lock,
        recorder: FlightRecorder,
        failures: RankErrors,
    ) -> None:
        """Args:
        rank, world_size: of this process.
        store, lock: a connection to the store, and the lock to hold while using it.
        recorder: of this rank's calls.
        failures: reports of the other ranks' errors.
        """
        self.rank, self.world_size = rank, world_size
        self.limit_s = DEFAULT_LIMIT_S
        self.ended = False
        self._store, self._lock, self._flight, self._failures = store, lock, recorder, failures
        self._host, self._beat = socket.gethostname(), 0

    @property
    def interval_s(self) -> float:
        """Seconds between two status messages."""
        return min(_BEAT_S, self.limit_s / 4)

    def publish(self) -> None:
        """Publish this rank's status."""
        self._beat += 1
        state = RankStatus.of(self._flight, self._beat, self._host, ended=self.ended)
        with self._lock:
            self._store.set(f"{_KEY}{self.rank}", state.to_json())

    def read(self) -> dict[int, RankStatus]:
        """Return all ranks' last reported states."""
        keys = [f"{_KEY}{rank}" for rank in range(self.world_size)]
        with self._lock:
            if not self._store.check(keys):
                keys = [key for key in keys if self._store.check([key])]
            found = self._store.multi_get(keys)
        return {int(key.removeprefix(_KEY)): RankStatus.from_json(text) for key, text in zip(keys, found, strict=True)}

    def what(self, call: Call, error: Exception | None) -> str:
        """Describe the call that does not end; ``error``: the one it raised, if any."""
        step = "" if call.step is None else f" in step {call.step}"
        late = error is None or "imed out" in str(error) or "timeout" in str(error).lower()
        how = f"did not finish in {self.limit_s:g} s" if late else "failed"
        reason = "" if late or error is None else f": {_first_line(error)}"
        return f"{call}{step}, number {call.number} over these ranks, {how}{reason}"

    def failure_behind(self, call: Call) -> Failure | None:
        """Return the error of another rank that a call does not end for; None if no other rank has failed."""
        with suppress(RuntimeError):
            self.publish()
        failures = self._failures.from_other_ranks()
        if not failures:
            return None
        awaited = awaited_ranks(waiting_call(call), self.read(), self.rank)
        return next((one for one in failures if one.rank in awaited), failures[0])

    def verdict(self, call: Call, error: Exception | None) -> str:
        """Return why a call does not end although no rank has failed, as found by the first rank that looked."""
        states, how = self._fresh_states(waiting_call(call))
        text = f"{self.what(call, error)}\n{self._explain(waiting_call(call), states, how)}"
        with self._lock:
            agreed: bytes = self._store.compare_set(_VERDICT, "", text)
        first = agreed.decode()
        return text if first == text else f"{first}\n(Rank {self.rank} was in {call}.)"

    def stays_away(self, call: Call) -> str | None:
        """Return why a meeting will fail: a line for each rank that it waits for; None if all may still come."""
        states = self.read()
        causes = awaited_ranks(waiting_call(call), states, self.rank)
        if not any(rank in states and self._is_past(states[rank]) for rank in causes):
            return None
        how = {rank: process_state(state, self._host) for rank, state in states.items()}
        return "\n".join(describe_rank(rank, states.get(rank), how.get(rank, ""), states) for rank in causes)

    def agreed(self) -> str | None:
        """Return the verdict, if a rank has reached one."""
        with self._lock:
            return self._store.get(_VERDICT).decode() if self._store.check([_VERDICT]) else None

    # -- within -------------------------------------------------------------------------------------------------

    def _is_past(self, state: RankStatus) -> bool:
        """Return True if a rank will never join this rank's call: it has called, or waits in, one that this rank has not called.

        Ranks run the same program, so calls come in one order; but a message may be sent before its receiver is ready.
        """
        mine, waiting = self._flight.counts, state.waiting
        if waiting is not None and self.rank in waiting.ranks and mine.get(waiting.channel, 0) < waiting.number:
            return True
        ahead = (name for name, count in mine.items() if state.counts.get(name, 0) > count)
        return state.ended or any(">" not in name for name in ahead)

    def _explain(self, waiting: Waiting, states: dict[int, RankStatus], how: dict[int, str]) -> str:
        missing = ranks_behind(waiting, states, self.rank)
        causes = awaited_ranks(waiting, states, self.rank)
        lines = [describe_rank(rank, states.get(rank), how.get(rank, ""), states) for rank in causes]
        seen = {self.rank, *causes}
        lines += [
            describe_rank(rank, states[rank], found, states)
            for rank, found in sorted(how.items())
            if rank not in seen and found in ("gone", "stopped", "silent")
        ]
        if not lines:
            return (
                "All its ranks have called it and are alive: the connection between them failed, or their devices hang"
            )
        head = "Ranks that did not arrive:" if missing else "All its ranks have called it, but:"
        advice = ""
        if all(how.get(rank) not in ("gone", "stopped", "silent") for rank in seen):
            advice = (
                "\nIf a rank may need longer than that, say so: Engine(..., watchdog=SECONDS) or "
                "MESHFOLD_WATCHDOG=SECONDS. If ranks go different ways, MESHFOLD_DEBUG=collectives compares their calls"
            )
        return "\n".join([head, *lines]) + advice

    def _fresh_states(self, waiting: Waiting) -> tuple[dict[int, RankStatus], dict[int, str]]:
        """Return the states of all ranks once the relevant ones are fresh, and the states of their processes."""
        first = self.read()
        deadline = time.monotonic() + 2.5 * self.interval_s
        while True:
            states = self.read()
            how = {rank: process_state(state, self._host) for rank, state in states.items()}
            stale = [
                rank
                for rank in waiting.ranks
                if rank != self.rank
                and how.get(rank, "") in ("", "runs")
                and (rank not in first or states[rank].beat < first[rank].beat + 2)
            ]
            if not stale or time.monotonic() > deadline:
                break
            time.sleep(self.interval_s / 5)
        for rank in stale:
            if how.get(rank) == "" and rank in first and states[rank].beat == first[rank].beat:
                how[rank] = "silent"
        return states, how


def _first_line(error: Exception) -> str:
    """Return gloo's or NCCL's message without its source line and advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0]
