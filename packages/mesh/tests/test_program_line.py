"""Lines of the user's program: of this thread, of the main thread as another one sees it, and of an error."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from meshfold.mesh.recording.program_line import main_line, own_line, raised_at


def in_thread(wait: Callable[[threading.Event], None], times: int = 1) -> list[str]:
    """Return the main thread's line as another thread reads it while the main thread is in ``wait``."""
    found: list[str] = []
    done = threading.Event()

    def read() -> None:
        time.sleep(0.05)
        found.extend(main_line() for _ in range(times))
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    wait(done)
    thread.join()
    return found


def waits_here(done: threading.Event) -> None:
    done.wait(60)


def test_own_line_is_the_innermost_of_the_user() -> None:
    here = r"test_program_line\.py:\d+ in test_own_line_is_the_innermost_of_the_user"
    assert re.fullmatch(here, own_line())
    assert re.fullmatch(here, main_line())


def test_another_thread_reads_where_the_main_thread_waits() -> None:
    (line,) = in_thread(waits_here)
    assert re.fullmatch(r"test_program_line\.py:\d+ in waits_here", line)


def test_no_frame_of_a_running_thread_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("frames of a running thread were asked for")

    monkeypatch.setattr(sys, "_current_frames", refuse)
    assert in_thread(waits_here)[0].endswith("in waits_here")


def test_reads_while_the_main_thread_calls_returns_and_yields() -> None:
    def numbers(depth: int) -> Iterator[int]:
        if depth:
            yield from numbers(depth - 1)
        yield depth

    def descend(depth: int) -> int:
        return descend(depth - 1) if depth else sum(numbers(8))

    def run(done: threading.Event) -> None:
        while not done.is_set():
            descend(30)

    lines = in_thread(run, times=100)
    assert len(lines) == 100
    assert all(line.startswith("test_program_line.py:") for line in lines)


def test_without_a_file_the_line_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert in_thread(waits_here) == ["an unknown line"]


def test_an_error_of_torch_is_raised_at_the_users_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 3)(torch.zeros(1, 5))
    line = raised_at(caught.value)
    assert re.fullmatch(r"test_program_line\.py:\d+ in test_an_error_of_torch_is_raised_at_the_users_line", line)
