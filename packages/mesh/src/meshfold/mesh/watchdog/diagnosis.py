"""The diagnosis of a call that does not end, from what ranks tell each other through the store.

Once a second each rank leaves where it is (`rank_status.py`). When a call does not end, a rank compares: those
that have made fewer calls over that group have not arrived. The first rank to look writes down what it found, its verdict, and
the others end with that.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from meshfold.mesh.processes.rendezvous import process_state
from meshfold.mesh.recording.flight_recorder import Call, FlightRecorder
from meshfold.mesh.watchdog.rank_errors import RankErrors
from meshfold.mesh.watchdog.rank_status import (
    RankStatus,
    Waiting,
    behind,
    told,
    waited_for,
    waiting_of,
)

DEFAULT_LIMIT_S = 600.0

_BEAT_S = 1.0
_KEY, _VERDICT = "meshfold watch/", "meshfold watch/verdict"


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
        store, lock: a connection to the store, and what to hold while it is used.
        recorder: of this rank's calls.
        failures: what is heard of the others' errors.
        """
        self.rank, self.world_size = rank, world_size
        self.limit_s = DEFAULT_LIMIT_S
        self.ended = False
        self._store, self._lock, self._flight, self._failures = store, lock, recorder, failures
        self._host, self._beat = socket.gethostname(), 0

    @property
    def interval_s(self) -> float:
        """Between two signs of life."""
        return min(_BEAT_S, self.limit_s / 4)

    def publish(self) -> None:
        """Let the others see where this rank is."""
        self._beat += 1
        state = RankStatus.of(self._flight, self._beat, self._host, ended=self.ended)
        with self._lock:
            self._store.set(f"{_KEY}{self.rank}", state.written())

    def read(self) -> dict[int, RankStatus]:
        """Return all ranks' states, as they were told last."""
        keys = [f"{_KEY}{rank}" for rank in range(self.world_size)]
        with self._lock:
            if not self._store.check(keys):
                keys = [key for key in keys if self._store.check([key])]
            found = self._store.multi_get(keys)
        return {
            int(key.removeprefix(_KEY)): RankStatus.read(text) for key, text in zip(keys, found, strict=True)
        }

    def what(self, call: Call, error: Exception | None) -> str:
        """Describe the call that does not end; ``error``: what it raised, if it did."""
        step = "" if call.step is None else f" in step {call.step}"
        late = error is None or "imed out" in str(error) or "timeout" in str(error).lower()
        how = f"did not finish in {self.limit_s:g} s" if late else "failed"
        reason = "" if late or error is None else f": {_first_line(error)}"
        return f"{call}{step}, number {call.number} over these ranks, {how}{reason}"

    def verdict(self, call: Call, error: Exception | None) -> str:
        """Why a call does not end: what the first rank found that looked."""
        with suppress(RuntimeError):
            self.publish()
        failures = self._failures.elsewhere()
        if failures:
            awaited = waited_for(waiting_of(call), self.read(), self.rank)
            cause = next((one for one in failures if one.rank in awaited), failures[0])
            return cause.told(self.rank, call)
        states, how = self._look(waiting_of(call))
        text = f"{self.what(call, error)}\n{self._who(waiting_of(call), states, how)}"
        with self._lock:
            agreed: bytes = self._store.compare_set(_VERDICT, "", text)
        first = agreed.decode()
        return text if first == text else f"{first}\n(Rank {self.rank} was in {call}.)"

    def stays_away(self, call: Call) -> str | None:
        """Why a meeting will not come about: a line for each rank that it waits for; None if all may still come."""
        states = self.read()
        causes = waited_for(waiting_of(call), states, self.rank)
        if not any(rank in states and self._is_past(states[rank]) for rank in causes):
            return None
        how = {rank: process_state(state, self._host) for rank, state in states.items()}
        return "\n".join(told(rank, states.get(rank), how.get(rank, ""), states) for rank in causes)

    def agreed(self) -> str | None:
        """Return the verdict, if some rank has come to one."""
        with self._lock:
            return self._store.get(_VERDICT).decode() if self._store.check([_VERDICT]) else None

    # -- within -------------------------------------------------------------------------------------------------

    def _is_past(self, state: RankStatus) -> bool:
        """Tell whether a rank will not come to where this one is: it has called, or waits in, what this one has not called.

        For both run the same program. Messages may be sent ahead of those who receive them.
        """
        mine, waiting = self._flight.counts, state.waiting
        if (
            waiting is not None
            and self.rank in waiting.ranks
            and mine.get(waiting.channel, 0) < waiting.number
        ):
            return True
        ahead = (name for name, count in mine.items() if state.counts.get(name, 0) > count)
        return state.ended or any(">" not in name for name in ahead)

    def _who(self, waiting: Waiting, states: dict[int, RankStatus], how: dict[int, str]) -> str:
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

    def _look(self, waiting: Waiting) -> tuple[dict[int, RankStatus], dict[int, str]]:
        """Return all ranks' states, once those that matter are fresh, and the states of their processes."""
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
    """Return gloo's or NCCL's message without the line of its source and advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0]
