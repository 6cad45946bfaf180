"""A disk that fails from some call on, and the error that follows."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def broken(call: str, after: int) -> Iterator[None]:
    """From the call after so many on, a disk that takes or gives nothing."""
    real, left, lock = getattr(os, call), [after], threading.Lock()

    def failing(*arguments: Any) -> Any:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, "the cable is out")
        return real(*arguments)

    with mock.patch.object(os, call, failing):
        yield


def raised(action: Callable[[], object]) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")
