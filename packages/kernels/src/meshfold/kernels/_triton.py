"""Tools of the Triton kernels: their launch, their grids, and the hash of random_bits."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, *arguments: Any, **settings: Any) -> None:
    """Run ``kernel`` over ``grid`` on the device of ``on``; an empty grid is no work.

    Triton launches on the current device, which need not be the tensor's.
    """
    if 0 in grid:
        return
    if on.is_cuda and on.device.index != torch.cuda.current_device():
        with torch.cuda.device(on.device):
            kernel[grid](*arguments, **settings)
    else:
        kernel[grid](*arguments, **settings)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(blocks: int, on: Tensor, per_multiprocessor: int = 4) -> int:
    """Return the number of programs that share ``blocks`` blocks of work when each goes through several of them."""
    return min(blocks, _multiprocessors(on.device.index) * per_multiprocessor if on.is_cuda else 3)


def tile(columns: int, elements: int = 2048, widest: int = 65536) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a block of about ``elements`` elements over rows of ``columns``; powers of two."""
    wide = min(1 << max(columns - 1, 0).bit_length(), widest)
    rows = max(1, min(32, elements // wide))
    size = rows * wide
    return rows, wide, 4 if size <= 2048 else 8 if size <= 8192 else 16 if size <= 32768 else 32


@triton.jit
def bits_at(state, index):
    """Return the bits ``splitmix64(state + index * GOLDEN)`` as uint64."""
    z = state.to(tl.uint64) + index.to(tl.uint64) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
