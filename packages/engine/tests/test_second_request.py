"""The same request to stop a second time ends the process, whatever it waits in; twice at once is one request."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from meshfold.engine.long_runs.stopping import SAME_S, SecondRequest

SECONDS = 120.0

# Waiting for a store is waiting in C++: a handler in Python does not run.
STUCK = """
from datetime import timedelta
from torch._C._distributed_c10d import HashStore
from meshfold.engine import Engine
from meshfold.engine.long_runs.stopping import GracefulStop
from torch import nn

with GracefulStop(Engine(nn.Linear(2, 2), device="cpu")):
    open("waits", "w").close()
    HashStore().wait(["never"], timedelta(seconds=300))
"""


def stuck(folder: Path, python: str) -> subprocess.Popen[str]:
    (folder / "stuck.py").write_text(STUCK)
    process = subprocess.Popen([python, "stuck.py"], cwd=folder, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + SECONDS
    while not (folder / "waits").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process


def test_a_process_that_waits_in_c_ends_at_the_second_request(tmp_path: Path, warm_python: str) -> None:
    process = stuck(tmp_path, warm_python)
    try:
        for number in (
            signal.SIGTERM,
            signal.SIGTERM,
            signal.SIGUSR1,
        ):  # one request told twice, and another one
            process.send_signal(number)
        time.sleep(1.5 * SAME_S)
        assert process.poll() is None
        deadline = time.monotonic() + SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGTERM)
            time.sleep(SAME_S / 4)  # a busy machine may have told it of the first one late
        assert process.poll() == 128 + signal.SIGTERM
        assert process.communicate()[1] == "asked to stop a second time: ended at once, the last checkpoint stays\n"
    finally:
        process.kill()
        process.wait()


def test_a_forked_child_is_asked_for_itself() -> None:
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    waiting = SecondRequest([signal.SIGUSR2], says=False)
    try:
        child = os.fork()
        if child == 0:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR2)
                time.sleep(1.2 * SAME_S)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        waiting.close()
        signal.signal(signal.SIGUSR2, before)


def test_one_who_reads_signals_already_keeps_them() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    assert signal.set_wakeup_fd(writer) == -1
    try:
        SecondRequest([signal.SIGUSR2], says=False).close()
        assert signal.set_wakeup_fd(-1) == writer
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("times", [1, 2])
def test_it_can_be_closed_and_made_again(times: int) -> None:
    for _ in range(times):
        waiting = SecondRequest([signal.SIGUSR2], says=False)
        waiting.close()
        waiting.close()
    assert signal.set_wakeup_fd(-1) == -1
