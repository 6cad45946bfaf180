"""Lines of the user's program, for messages: ``train.py:31 in load``."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

_LIBRARY = os.path.dirname(os.__file__) + os.sep


def own_line() -> str:
    """Return the line of the user's program that this thread is in: ``train.py:31 in load``."""
    return _line(sys._getframe(1))


def main_line() -> str:
    """Return the line of the user's program that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "its end" if frame is None else _line(frame)


def raised_at(error: BaseException) -> str:
    """Return the line of the user's program that raised an error."""
    places = list(traceback.walk_tb(error.__traceback__))
    users = [place for place in places if _is_users(place[0])]
    return _described(*(users or places)[-1]) if places else main_line()


def _line(innermost: FrameType) -> str:
    """Return the innermost line that is not torch's, ours or Python's own; the innermost if there is no other."""
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
