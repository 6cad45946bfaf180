"""The fetch of weights into the GPU's cache in Triton: each thread asks for one piece, and no result is awaited."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch

_PIECE = 4096
_THREADS = 32
# Hopper's instruction for whole pieces; the older one asks for a line of the cache.
_ASK = tl.constexpr(
    f"{{ .reg .b32 size; mov.b32 size, {_PIECE}; cp.async.bulk.prefetch.L2.global [$1], size; mov.b32 $0, size; }}"
)


@triton.jit
def _fetch(first, second, pieces, PIECE: tl.constexpr, THREADS: tl.constexpr):
    piece = tl.minimum(tl.program_id(0) * THREADS + tl.arange(0, THREADS), pieces - 1)
    start = first.to(tl.int64)
    if tl.program_id(1) == 1:
        start = second.to(tl.int64)
    address = start + piece.to(tl.int64) * PIECE
    tl.inline_asm_elementwise(_ASK, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


def launch_fetch(weights: Sequence[Tensor], count: int) -> None:
    """Ask for the first bytes of one or two weights of equal shape.

    Args:
        weights: which; those that do not begin at a multiple of 16 bytes are left out.
        count: bytes of each.
    """
    given = [each for each in weights if each.data_ptr() % 16 == 0]
    pieces = count // _PIECE
    if given and pieces:
        grid = (cdiv(pieces, _THREADS), len(given))
        launch(_fetch, grid, given[0], given[0], given[-1], pieces, PIECE=_PIECE, THREADS=_THREADS, num_warps=1)
