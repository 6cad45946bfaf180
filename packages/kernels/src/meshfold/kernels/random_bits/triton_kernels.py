"""The Triton twin of the hash: the same bits as the torch reference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bits_at(state, index):
    """bits = splitmix64(state + index * GOLDEN) as uint64."""
    z = state.to(tl.uint64) + index.to(tl.uint64) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
