"""Spare programs of a kernel fetch weights into the GPU's cache; in Triton. Each thread asks for a piece, and awaits nothing."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from meshfold.kernels.weights_ahead import PIECE, Ahead

_BYTES = tl.constexpr(PIECE)
# Hopper's instruction for whole pieces; the older one asks for a line of the cache.
_ASK = tl.constexpr(
    f"{{ .reg .b32 size; mov.b32 size, {PIECE}; cp.async.bulk.prefetch.L2.global [$1], size; mov.b32 $0, size; }}"
)


@triton.jit
def ask(first, second, pieces, number, THREADS: tl.constexpr):
    """Ask for pieces of two runs of bytes, THREADS of them, the ``number``-th so many."""
    piece = tl.minimum(number * THREADS + tl.arange(0, THREADS), 2 * pieces - 1)
    behind = piece >= pieces
    address = tl.where(behind, second, first).to(tl.int64) + (piece - tl.where(behind, pieces, 0)).to(tl.int64) * _BYTES
    tl.inline_asm_elementwise(_ASK, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


def asking(ahead: Ahead, warps: int) -> dict[str, Any]:
    """Return the settings of a kernel that has programs to :func:`ask`: their threads, and whether there are any."""
    return dict(AHEAD=ahead.pieces > 0, THREADS=32 * warps)
