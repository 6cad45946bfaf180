"""Lines of the user's program, for messages: ``train.py:31 in load``."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter, itemgetter
from types import FrameType

from meshfold.mesh.garbage import collector_paused

_PYTHON = os.path.dirname(os.__file__) + os.sep
_MOST = 100  # frames to read

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
    found = _stack(main.ident or 0)
    return _described(found) if found else "its end"


def raised_at(error: BaseException) -> str:
    """Return the line of the user's program that raised an error."""
    found = _locations(traceback.walk_tb(error.__traceback__))[::-1]
    return _described(found) if found else main_line()


def _stack(thread: int) -> list[Location]:
    """Return a thread's innermost 100 locations, innermost first; none for a thread without Python frames."""
    with collector_paused():  # finalizers run Python code, which may switch threads
        low, high = 0, _MOST + 1  # bounds of the stack's depth
        read: tuple[object, ...] = ()
        depth = _MOST
        while low + 1 < high:
            try:
                read = _innermost(thread, depth)
                low = depth
            except AttributeError:  # not that deep
                high = depth
            except KeyError:
                return []
            depth = (low + high) // 2
    return [
        (code.co_filename, "?" if line is None else line, code.co_name)  # type: ignore[attr-defined, misc]
        for code, line in zip(read[::2], read[1::2], strict=True)
    ]


def _innermost(thread: int, depth: int) -> tuple[object, ...]:
    """Return code and line of a thread's innermost frames in order, read in a single call of C.

    A running thread gets no turn within it, so its stack is whole. The thread keeps running between two steps of a walk in
    Python. A generator that yields then leaves a frame whose caller is gone, and reading that frame crashes. ``faulthandler``
    reads the stacks of all threads, and crashes on a native one that enters Python at that moment, as workers of gloo do to
    free a tensor.

    Raises:
        AttributeError: if the thread has fewer frames.
        KeyError: if it has none.
    """
    frames = map(itemgetter(thread), iter(sys._current_frames, None))
    return next(map(_reader(depth), frames))


@cache
def _reader(depth: int) -> Callable[[FrameType], tuple[object, ...]]:
    return attrgetter(*(f"{'f_back.' * number}{name}" for number in range(depth) for name in ("f_code", "f_lineno")))


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
