"""Lines of the user's program: of this thread, of the main thread as another one sees it, and of an error."""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

from meshfold.mesh.recording.program_line import Location, _stack, main_line, own_line, raised_at


def await_main_thread(function: str, innermost: str = "") -> None:
    """Wait until the main thread is in a function, and in another one at its end."""
    main = threading.main_thread().ident or 0
    while True:
        names = [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
        if function in names and innermost in ("", names[0]):
            return
        time.sleep(0.001)


def in_thread(wait: Callable[[threading.Event], None], times: int = 1) -> list[str]:
    """Return the main thread's line as another thread reads it while the main thread is in ``wait``."""
    found: list[str] = []
    done = threading.Event()

    def read() -> None:
        await_main_thread(wait.__name__)
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


def test_stacks_of_other_threads_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading those of all threads crashes where a native one enters Python at that moment."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("stacks of all threads were asked for")

    monkeypatch.setattr("faulthandler.dump_traceback", refuse)
    assert in_thread(waits_here)[0].endswith("in waits_here")


@pytest.mark.parametrize("depth", [1, 40, 99, 100, 300])
def test_stacks_of_any_depth(depth: int) -> None:
    def deeper(done: threading.Event, left: int) -> None:
        if left:
            deeper(done, left - 1)
        else:
            waits_here(done)

    read: list[list[Location]] = []

    def look() -> None:
        await_main_thread("waits_here", "wait")
        read.append(_stack(threading.main_thread().ident or 0))
        done.set()

    done = threading.Event()
    reader = threading.Thread(target=look)
    reader.start()
    deeper(done, depth)
    reader.join()
    names = [name for _, _, name in read[0]]
    assert "waits_here" in names[:4] and names.count("deeper") == min(depth + 1, 100 - names.index("waits_here") - 1)
    *_, (outermost, _) = traceback.walk_stack(sys._getframe())
    assert len(names) == 100 or names[-1] == outermost.f_code.co_name  # as many as are read, or all


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

    lines = in_thread(run, times=2000)
    assert len(lines) == 2000
    assert all(line.startswith("test_program_line.py:") for line in lines)


def test_an_error_of_torch_is_raised_at_the_users_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 3)(torch.zeros(1, 5))
    line = raised_at(caught.value)
    assert re.fullmatch(r"test_program_line\.py:\d+ in test_an_error_of_torch_is_raised_at_the_users_line", line)
