"""Two entries of a folder change places in one instant: at no moment is a name without a file or folder.

Linux can (``renameat2`` with ``RENAME_EXCHANGE``, renameat2(2)) on the file systems of its own; network file systems and other
systems mostly cannot.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_HERE = -100  # AT_FDCWD: paths are as given
_EXCHANGE = 2  # RENAME_EXCHANGE


def exchange(one: Path, other: Path) -> bool:
    """Give each the other's name.

    Returns:
        Whether it was done; if not, nothing was.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # of glibc since 2.28
    if rename is None:
        return False
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)
