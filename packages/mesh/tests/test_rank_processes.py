"""The processes of a local job, where the launcher is late: a signal that came before it waits, a death that it sees long after."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshfold.mesh.processes import launcher, rank_processes
from meshfold.mesh.processes.rank_processes import Failure, Rank, Signals, watch
from meshfold.mesh.processes.rendezvous import is_ending

LONG_S = 100.0


class Process:
    """The process of a rank; it has ended when it has a code."""

    def __init__(self, code: int | None = None, pid: int = 1) -> None:
        self.code, self.pid = code, pid

    def poll(self) -> int | None:
        return self.code


class Running:
    """A rank that runs on, and that nobody is to wait for."""

    quiet = False

    def __init__(self, signals: Signals) -> None:
        self.process, self.sent, self._signals = Process(), [], signals  # type: ignore[var-annotated]

    def failure(self) -> Failure | None:
        raise AssertionError("it was waited for although a signal had come")

    def send(self, number: int, *, alone: bool = False) -> None:
        self.sent.append(number)
        self._signals.caught.append(signal.SIGINT)  # the second Ctrl-C comes before the launcher waits again


def test_a_signal_that_came_before_the_wait_ends_it() -> None:
    signals = Signals()
    signals.caught.append(signal.SIGTERM)
    assert watch([Running(signals)], signals, seconds=LONG_S) is None  # type: ignore[list-item]


def test_a_second_request_that_comes_at_once_ends_the_wait(capsys: pytest.CaptureFixture[str]) -> None:
    signals = Signals(gentle=True)
    signals.caught.append(signal.SIGINT)
    rank = Running(signals)
    assert launcher._let_stop([rank], signals, LONG_S, 75) is None  # type: ignore[list-item]
    assert rank.sent == [signal.SIGTERM] and "Ctrl-C again" in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(rank_processes.time, "monotonic", lambda: now[0])
    return now


def rank(number: int, folder: Path, process: Any, now: float) -> Rank:
    made = object.__new__(Rank)
    made.rank, made.noticed, made.seen_alive, made.process = number, None, now, process
    made._record = folder / f"rank{number}.json"
    return made


def test_a_death_that_is_seen_late_comes_before_its_echoes(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher did not run for seconds; the error of the other rank is of that time."""
    monkeypatch.setattr(rank_processes, "is_ending", lambda pid: False)
    dies, other = rank(0, tmp_path, Process(), clock[0]), rank(1, tmp_path, Process(1), clock[0])
    assert dies.failure() is None
    record = dict(time=clock[0] + 1.0, code=1, traceback="broken", sentence="")
    other._record.write_text(json.dumps(record))
    clock[0] += 5.0
    dies.process.code = -signal.SIGKILL  # type: ignore[attr-defined]
    found = watch([dies, other], Signals())
    assert found is not None and (found.rank, found.how) == (0, "was ended by SIGKILL")


def test_a_rank_that_begins_to_end_is_waited_for(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections have broken, and the others have said so; how it ends is known later than is waited for."""
    dies, other = rank(0, tmp_path, Process(), clock[0]), rank(1, tmp_path, Process(1), clock[0])
    runs = rank(2, tmp_path, Process(pid=2), clock[0])
    monkeypatch.setattr(rank_processes, "is_ending", lambda pid: pid == 1)
    other._record.write_text(json.dumps(dict(time=clock[0] + 1.0, code=1, traceback="broken", sentence="")))

    def later(seconds: float) -> None:
        clock[0] += 0.1
        if clock[0] > 105.0:
            dies.process.code = -signal.SIGKILL  # type: ignore[attr-defined]

    monkeypatch.setattr(rank_processes.time, "sleep", later)
    found = watch([dies, other, runs], Signals())
    assert found is not None and found.rank == 0 and 105.0 < clock[0] < 106.0


def test_a_process_that_has_ended_is_seen_before_it_is_waited_for() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert not is_ending(process.pid)
        process.kill()
        while not is_ending(process.pid):
            pass
        assert process.wait() == -signal.SIGKILL
    assert not is_ending(process.pid)
