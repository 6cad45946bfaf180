"""Compiled loops for random numbers on the CPU, for processes that draw many."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

COMPILE_AFTER = 1 << 21
"""Elements that a process draws by torch before it loads the loops: 0.1 s of one core. To import numba and compile a loop takes
0.8 s, once on a machine, and 0.5 s from its cache."""
_FEWEST_PER_THREAD = 1 << 16
_drawn = 0


def is_compiled(local: Tensor) -> bool:
    """Return True if a tensor should be filled by a loop. Count its elements otherwise."""
    global _drawn
    if local.device.type != "cpu" or type(local) not in (Tensor, nn.Parameter):
        return False
    if _drawn < COMPILE_AFTER:
        _drawn += local.numel()
        return False
    return _kernels() is not None


@functools.cache
def _kernels() -> ModuleType | None:
    """Return the module of loops; None without numba, or where numba finds no folder for its cache."""
    try:
        return importlib.import_module("meshfold.mesh.random.numbers_numba")
    except (ImportError, OSError, RuntimeError):
        return None


class Loop(Protocol):
    """A compiled loop with its distribution's numbers."""

    def fill_(self, block: Tensor, origin: Tensor, steps: Sequence[Tensor]) -> None:
        """Fill a block in place.

        Args:
            block: to fill: any strides and floating dtype, on the CPU.
            origin: the counter of its origin, a number.
            steps: what is added to the counter at each position, one int64 vector a dim.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalLoop:
    """Normal numbers.

    Attributes:
        mean: of the numbers.
        std: their standard deviation.
        first: added to the counters of the first uniform number, in [0, 2**64).
        second: of the second uniform number.
    """

    mean: float
    std: float
    first: int
    second: int

    def fill_(self, block: Tensor, origin: Tensor, steps: Sequence[Tensor]) -> None:
        words = (np.uint64(self.first), np.uint64(self.second))
        _run("fill_normal", block, origin, steps, *words, float(self.std), float(self.mean))


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformLoop:
    """Uniform numbers.

    Attributes:
        low: least value.
        high: bound that is not reached.
        first: added to the counters, in [0, 2**64).
    """

    low: float
    high: float
    first: int

    def fill_(self, block: Tensor, origin: Tensor, steps: Sequence[Tensor]) -> None:
        wide = block.dtype == torch.float64
        kernel, number = ("fill_uniform_64", float) if wide else ("fill_uniform_32", np.float32)
        _run(kernel, block, origin, steps, np.uint64(self.first), number(self.high - self.low), number(self.low))


def _run(name: str, block: Tensor, origin: Tensor, steps: Sequence[Tensor], *arguments: Any) -> None:
    """Run a kernel over rows (all dims but the last) and columns, on torch's number of threads."""
    kernel: Callable[..., None] = getattr(_kernels(), name)
    dtype = block.dtype if block.dtype == torch.float64 else torch.float32
    direct = block.is_contiguous() and block.dtype == dtype
    out = block.detach() if direct else torch.empty(block.shape, dtype=dtype)
    rows = origin
    for step in steps[:-1]:
        rows = rows.unsqueeze(-1) + step
    columns = steps[-1] if steps else torch.zeros(1, dtype=torch.int64)
    table = out.view(rows.numel(), columns.numel()).numpy()
    counters, across = (x.contiguous().view(-1).numpy().view(np.uint64) for x in (rows, columns))
    threads = min(torch.get_num_threads(), len(counters), block.numel() // _FEWEST_PER_THREAD)
    if threads < 2:
        kernel(table, counters, across, *arguments)
    else:
        pieces = zip(np.array_split(table, threads), np.array_split(counters, threads), strict=True)
        with ThreadPoolExecutor(threads, "meshfold-random") as pool:
            for made in [pool.submit(kernel, part, some, across, *arguments) for part, some in pieces]:
                made.result()
    if not direct:
        block.copy_(out)
