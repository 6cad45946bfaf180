"""Lines of the user's program, for messages: ``train.py:31 in load``."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable
from types import FrameType

_PYTHON = os.path.dirname(os.__file__) + os.sep
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\S+) in (.*)')

#: A file, a line in it and the function there.
Location = tuple[str, int | str, str]


def own_line() -> str:
    """Return the line of the user's program that this thread is in: ``train.py:31 in load``."""
    return _described(_locations(traceback.walk_stack(sys._getframe(1))))


def main_line() -> str:
    """Return the line of the user's program that the main thread is in."""
    main = threading.main_thread()
    if threading.current_thread() is main:
        return own_line()
    try:
        found = _stack(main.ident or 0)
    except OSError:  # no file can be written
        found = None
    if found is None:
        return "an unknown line"
    return _described(found) if found else "its end"


def raised_at(error: BaseException) -> str:
    """Return the line of the user's program that raised an error."""
    found = _locations(traceback.walk_tb(error.__traceback__))[::-1]
    return _described(found) if found else main_line()


def _stack(thread: int) -> list[Location] | None:
    """Return a thread's innermost 100 locations, innermost first; None for one that is not among the newest 100 threads.

    Python writes them in one call. Frames of a running thread are not safe to walk from here: they may be freed
    between two steps.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode(errors="replace")
    found: list[Location] | None = None
    for line in text.splitlines():
        if header := _THREAD.match(line):
            if found is not None:
                break
            if int(header[1], 16) == thread:
                found = []
        elif found is not None and (frame := _FRAME.fullmatch(line)):
            found.append((frame[1], frame[2], frame[3]))
    return found


def _locations(frames: Iterable[tuple[FrameType, int]]) -> list[Location]:
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


def _described(locations: list[Location]) -> str:
    """Return the first location that is not torch's, ours or Python's own; the first if there is no other."""
    ours = tuple(
        folder + os.sep
        for package in ("torch", "meshfold")
        for folder in getattr(sys.modules.get(package), "__path__", ())
    )
    users = (
        location
        for location in locations
        if not location[0].startswith(("<", *ours))
        and (not location[0].startswith(_PYTHON) or "site-packages" in location[0])
    )
    file, line, function = next(users, locations[0])
    return f"{os.path.basename(file)}:{line} in {function}"
