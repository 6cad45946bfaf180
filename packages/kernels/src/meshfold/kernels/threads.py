"""What parallel numba kernels share: how many threads they take, and tensors as bytes. Imports numba when called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def torch_threads() -> Iterator[None]:
    """Kernels inside the block run on as many threads as torch does, so that one setting rules both."""
    import numba

    before = numba.get_num_threads()
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    try:
        yield
    finally:
        numba.set_num_threads(before)


def as_bytes(x: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a NumPy array of bytes."""
    return x.detach().view(torch.uint8).numpy()
