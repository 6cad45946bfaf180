"""What parallel numba kernels share: how many threads they take. Imports numba when called."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_one_at_a_time = threading.Lock()


@contextmanager
def torch_threads() -> Iterator[None]:
    """Kernels inside the block run on as many threads as torch does, so that one setting rules both.

    Blocks do not nest. Those of several threads run side by side where numba's threads allow it, else in turns.
    """
    import numba

    wanted = torch.get_num_threads()
    before = numba.get_num_threads()
    if torch.get_num_threads() != wanted:  # numba has just started its threads, and told OpenMP how many
        torch.set_num_threads(wanted)
    numba.set_num_threads(min(wanted, numba.config.NUMBA_NUM_THREADS))
    try:
        with _turn():
            yield
    finally:
        numba.set_num_threads(before)


def _turn() -> AbstractContextManager[Any]:
    """Numba's own queue, which it takes where there is neither OpenMP nor TBB, ends a process that uses it twice at once."""
    import numba

    return _one_at_a_time if numba.threading_layer() == "workqueue" else nullcontext()
