"""The status of a rank: what it tells the others, and what can be told of one that no longer answers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from meshfold.mesh.recording.flight_recorder import Call, FlightRecorder, shortened
from meshfold.mesh.recording.program_line import main_line


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
        beat: grows with every message, so that one who reads twice sees whether the rank lives.
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
        longest = oldest(flight)
        return cls(
            beat=beat,
            host=host,
            pid=os.getpid(),
            step=flight.step,
            line=main_line(),
            ended=ended,
            counts=dict(flight.counts),
            last=str(flight.last[-1]) if flight.last else "",
            waiting=None if longest is None else waiting_of(longest),
        )

    def written(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> RankStatus:
        """Inverse of :meth:`written`."""
        words: dict[str, Any] = json.loads(text)
        if words["waiting"] is not None:
            words["waiting"]["ranks"] = tuple(words["waiting"]["ranks"])
            words["waiting"] = Waiting(**words["waiting"])
        return cls(**words)


def oldest(flight: FlightRecorder) -> Call | None:
    """Return the call that has been waited for longest."""
    waiting = [call for call in list(flight.waiting.values()) if call.since is not None]
    return min(waiting, key=lambda call: call.since or 0.0, default=None)


def waiting_of(call: Call) -> Waiting:
    """Return a call as others see it; of a message, the other side."""
    ranks = call.group.ranks if call.peer is None else (call.peer,)
    return Waiting(channel=call.channel, number=call.number, ranks=ranks, text=str(call))


def behind(waiting: Waiting, states: dict[int, RankStatus], me: int) -> list[int]:
    """Return the ranks that have not made a call that is waited for."""
    return [
        rank
        for rank in waiting.ranks
        if rank != me and (rank not in states or states[rank].counts.get(waiting.channel, 0) < waiting.number)
    ]


def waited_for(waiting: Waiting, states: dict[int, RankStatus], me: int) -> list[int]:
    """Return the ranks that a call waits for, then those that these wait for, and so on: whoever waits is no cause."""
    found = behind(waiting, states, me)
    for rank in found:  # grows
        state = states.get(rank)
        if state is not None and state.waiting is not None:
            found += [one for one in behind(state.waiting, states, me) if one not in found]
    return found


def told(rank: int, state: RankStatus | None, how: str, states: dict[int, RankStatus]) -> str:
    """Return a line about a rank. ``how``: see :func:`process_state`, or ``silent``."""
    if state is None:
        return f"  rank {rank}: it has never been heard of: it has not come as far as its first collective"
    where = f"process {state.pid} on {state.host}"
    what = {
        "gone": f"{where} is gone",
        "stopped": f"{where} is stopped (by SIGSTOP or a debugger)",
        "silent": f"{where} gives no sign of life",
    }.get(how, f"{where} runs")
    parts = [what]
    if state.ended and how != "gone":
        parts.append("its program has ended")
    if state.step is not None:
        parts.append(f"in step {state.step}")
    if state.ended:
        return f"  rank {rank}: {', '.join(parts)}"
    if state.waiting is not None and how in ("runs", ""):
        for_whom = behind(state.waiting, states, rank)
        who = f", for rank{'s'[: len(for_whom) > 1]} {shortened(tuple(for_whom))}" if for_whom else ""
        parts.append(f"it waits in {state.waiting.text}{who}")
    else:
        when = "" if how in ("runs", "") else "when last heard of "
        parts.append(f"{when}at {state.line}")
        if state.last:
            parts.append(f"its last collective {'was' if not when else 'then was'} {state.last}")
    return f"  rank {rank}: {', '.join(parts)}"
