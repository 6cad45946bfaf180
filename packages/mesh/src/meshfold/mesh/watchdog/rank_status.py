"""Where a rank is: what it tells the others, and what can be told of one that no longer answers."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from meshfold.mesh.recording.flight_recorder import Call, Flight, shortened

_LIBRARY = os.path.dirname(os.__file__) + os.sep


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A call that a rank waits for."""

    channel: str
    number: int
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What one rank says of itself.

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
    def of(cls, flight: Flight, beat: int, host: str, *, ended: bool) -> State:
        """This rank's."""
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
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> State:
        """The way back."""
        words: dict[str, Any] = json.loads(text)
        if words["waiting"] is not None:
            words["waiting"]["ranks"] = tuple(words["waiting"]["ranks"])
            words["waiting"] = Waiting(**words["waiting"])
        return cls(**words)


def oldest(flight: Flight) -> Call | None:
    """The call that is waited for longest."""
    waiting = [call for call in list(flight.waiting.values()) if call.since is not None]
    return min(waiting, key=lambda call: call.since or 0.0, default=None)


def waiting_of(call: Call) -> Waiting:
    """A call, as others see it; of a message, the other side."""
    ranks = call.group.ranks if call.peer is None else (call.peer,)
    return Waiting(channel=call.channel, number=call.number, ranks=ranks, text=str(call))


class Process(Protocol):
    """Where a process is."""

    @property
    def host(self) -> str:
        """The name of its machine."""

    @property
    def pid(self) -> int:
        """Its number there."""


def process_of(state: Process, host: str) -> str:
    """``runs``, ``gone`` or ``stopped``, of a process of this machine; empty for another machine's."""
    if state.host != host or not sys.platform.startswith("linux"):
        return ""
    try:
        letter = Path(f"/proc/{state.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "runs")


def behind(waiting: Waiting, states: dict[int, State], me: int) -> list[int]:
    """The ranks that have not made a call that is waited for."""
    return [
        rank
        for rank in waiting.ranks
        if rank != me and (rank not in states or states[rank].counts.get(waiting.channel, 0) < waiting.number)
    ]


def waited_for(waiting: Waiting, states: dict[int, State], me: int) -> list[int]:
    """The ranks that a call waits for, then those that these wait for, and so on: whoever waits is no cause."""
    found = behind(waiting, states, me)
    for rank in found:  # grows
        state = states.get(rank)
        if state is not None and state.waiting is not None:
            found += [one for one in behind(state.waiting, states, me) if one not in found]
    return found


def told(rank: int, state: State | None, how: str, states: dict[int, State]) -> str:
    """A line about a rank. ``how``: see :func:`process_of`, or ``silent``."""
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


def own_line() -> str:
    """``train.py:31 in load``: the line of the user's program that this thread is in."""
    return _line(sys._getframe(1))


def main_line() -> str:
    """The same of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "its end" if frame is None else _line(frame)


def raised_at(error: BaseException) -> str:
    """The same of an error that nobody caught."""
    places = list(traceback.walk_tb(error.__traceback__))
    users = [place for place in places if _is_users(place[0])]
    return _described(*(users or places)[-1]) if places else main_line()


def _line(innermost: FrameType) -> str:
    """The innermost line that is not torch's, ours or Python's own; the innermost if there is no other."""
    frame: FrameType | None = innermost
    while frame is not None:
        if _is_users(frame):
            return _described(frame, frame.f_lineno)
        frame = frame.f_back
    return _described(innermost, innermost.f_lineno)


def _is_users(frame: FrameType) -> bool:
    file, package = frame.f_code.co_filename, frame.f_globals.get("__name__", "").partition(".")[0]
    own = file.startswith(_LIBRARY) and "site-packages" not in file
    return package not in ("torch", "meshfold") and not own and not file.startswith("<")


def _described(frame: FrameType, line: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
