"""The processes of a local job: start, end, output, and which failed first."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from meshfold.mesh.processes import _bootstrap
from meshfold.mesh.processes.environment import Environment
from meshfold.mesh.processes.rendezvous import is_ending

_POLL_S = 0.02
# When a rank dies, the others' connections break at once. After the first sign of a failure, wait this long for an earlier
# one, and assume that a death happened this long before it was noticed, or when the rank was last seen alive if that is earlier.
_SETTLE_S = 0.25
_ENDING_S = 10.0  # the longest wait for a rank that has begun to end
_TAIL_LINES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Failure of a rank: ``time`` is of ``time.monotonic()``, ``code`` is the exit code for the job.

    ``sentence`` replaces the traceback if Meshfold refused the program's request.
    """

    rank: int
    time: float
    code: int
    how: str
    traceback: str = ""
    sentence: str = ""

    def ended_by(self, number: int) -> bool:
        """Return True if this signal, and no error of its own, ended the rank."""
        return self.code == 128 + number and not self.traceback


class Rank:
    """One process, the thread that reads its standard error, and the record it leaves when it fails."""

    _screen = threading.Lock()

    def __init__(
        self,
        argv: Sequence[str],
        place: Environment,
        variables: dict[str, str],
        records: Path,
        logs: Path | None,
    ) -> None:
        self.rank = place.rank
        self.quiet = False
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.noticed: float | None = None
        self.seen_alive = time.monotonic()
        self._record = records / f"rank{self.rank}.json"
        self._log: IO[str] | None = None if logs is None else (logs / f"rank{self.rank}.err").open("w")
        sys.stdout.flush()
        output: int | IO[bytes] | None = None  # rank 0 inherits the launcher's output
        if self.rank != 0:
            output = subprocess.DEVNULL if logs is None else (logs / f"rank{self.rank}.out").open("wb")
        self.process = subprocess.Popen(
            # -P: the bootstrap's folder must not be first on the path (its random.py is not Python's)
            [sys.executable, "-P", _bootstrap.__file__, str(os.getpid()), str(self._record), *argv],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            start_new_session=True,  # own process group, so that its children end with it
        )
        if output is not None and not isinstance(output, int):
            output.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def failure(self) -> Failure | None:
        """Return this rank's failure, if it failed; polled."""
        now = time.monotonic()
        code = self.process.poll()
        if code is not None and self.noticed is None:
            self.noticed = time.monotonic()
        if code is None and not is_ending(self.process.pid):
            self.seen_alive = now
        with suppress(FileNotFoundError):
            left = json.loads(self._record.read_text(encoding="utf-8"))
            how = "raised" if left["traceback"] else f"exited with code {left['code']}"
            return Failure(
                rank=self.rank,
                time=left["time"],
                code=left["code"],
                how=how,
                traceback=left["traceback"],
                sentence=left["sentence"],
            )
        if not code or self.noticed is None:
            return None
        died = min(self.noticed - _SETTLE_S, self.seen_alive)
        if code < 0:
            return Failure(rank=self.rank, time=died, code=128 - code, how=f"was ended by {_signal_name(-code)}")
        return Failure(rank=self.rank, time=died, code=code, how=f"exited with code {code}")

    def send(self, number: int, *, alone: bool = False) -> None:
        """Send a signal to the rank, and to the processes that it started unless ``alone``."""
        with suppress(ProcessLookupError, PermissionError):
            (os.kill if alone else os.killpg)(self.process.pid, number)

    def finish(self) -> None:
        """Read the rest of the standard error and close the log."""
        # A process that the rank left running may hold the pipe open: do not wait for it.
        self._reader.join(timeout=1.0)
        if self._log is not None:
            failed = self.failure()
            if failed is not None and failed.traceback:
                self._log.write(failed.traceback)
            self._log.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in _lines(self.process.stderr):
            self.tail.append(line)
            with suppress(ValueError):  # the log is closed, but a leftover process still writes
                if self._log is not None:
                    self._log.write(line)
                    self._log.flush()
            if not self.quiet:
                with self._screen:
                    sys.stderr.write(f"[rank {self.rank}] {line}")
                    sys.stderr.flush()


class Signals:
    """Requests to end, caught while the job runs (only the main thread can; elsewhere nothing is caught).

    Attributes:
        caught: in order.
        gentle: those that ask ranks to stop.
    """

    def __init__(self, *, gentle: bool = False) -> None:
        self.caught: list[int] = []
        self.gentle = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if gentle else ()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in sorted({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *self.gentle}):
                if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                    self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught.append(number)


def watch(
    job: list[Rank], signals: Signals, *, heeded: int = 0, calm: int = 0, seconds: float | None = None
) -> Failure | None:
    """Wait until all ranks have succeeded (None), one has failed (the first that did), or a signal has come (None).

    Args:
        job: the ranks.
        signals: caught before the wait or during it.
        heeded: how many of them do not end the wait.
        calm: a code that is as good as 0.
        seconds: time limit; None: no limit.
    """
    settled: float | None = None
    until = None if seconds is None else time.monotonic() + seconds
    while len(signals.caught) <= heeded and (until is None or time.monotonic() < until):
        failures = [
            failure for rank in job if (failure := rank.failure()) is not None and (not calm or failure.code != calm)
        ]
        if failures and settled is None:
            settled = time.monotonic() + _SETTLE_S
            for rank in job:
                rank.quiet = True  # later errors are only consequences
        if settled is not None and (len(failures) == len(job) or _is_over(settled, job)):
            return min(failures, key=lambda failure: failure.time)
        if not failures and all(rank.process.poll() in (0, calm) for rank in job):
            return None
        time.sleep(_POLL_S)
    return None


def _is_over(settled: float, job: list[Rank]) -> bool:
    """Return True after that moment, unless a rank has begun to end and does not say yet how: it may have failed first."""
    now = time.monotonic()
    return now >= settled and (now >= settled + _ENDING_S or not any(map(_ends_without_a_word, job)))


def _ends_without_a_word(rank: Rank) -> bool:
    return rank.process.poll() is None and is_ending(rank.process.pid) and rank.failure() is None


def end(job: list[Rank], grace_s: float, signals: Signals) -> None:
    """End the ranks that still run: ask, wait, kill. A second Ctrl-C ends the wait."""
    if all(rank.process.poll() == 0 for rank in job):
        return  # success: leave processes that the program started on purpose
    for rank in job:
        rank.send(signal.SIGTERM)
    deadline, patience = time.monotonic() + grace_s, len(signals.caught) + 1
    while time.monotonic() < deadline and len(signals.caught) < patience:
        if all(rank.process.poll() is not None for rank in job):
            break
        time.sleep(_POLL_S)
    for rank in job:
        rank.send(signal.SIGKILL)  # even if the rank has exited: its children may still run
    for rank in job:
        rank.process.wait()


def report(job: list[Rank], failure: Failure) -> None:
    """Print to standard error which rank failed, how, and its message, traceback or last output."""
    rank, ranks = job[failure.rank], len(job)
    text = failure.traceback
    if not text and rank.tail:
        text = "the last it wrote to standard error:\n" + "".join(rank.tail)
    who, others = f"rank {failure.rank} of {ranks}", "; the other ranks were ended" if ranks > 1 else ""
    said = f"{who} {failure.how}{others}.\n{text}"
    if failure.sentence:
        alike = [other.failure() for other in job]
        if ranks > 1 and all(one is not None and one.sentence == failure.sentence for one in alike):
            who, others = f"each of {ranks} ranks", ""
        said = f"{who}{others}: {failure.sentence}\n"
    sys.stdout.flush()
    sys.stderr.write(f"\n{said}")
    sys.stderr.flush()


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Yield lines as they arrive; a progress bar's carriage return also ends a line."""
    rest = b""
    while chunk := os.read(stream.fileno(), 65536):
        *whole, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            yield line.decode(errors="replace") + "\n"
    if rest:
        yield rest.decode(errors="replace") + "\n"


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
