"""The sum of the parts that ranks have pushed: in float32 for half precision, in the order of the ranks, rounded once.

The same pass can sum the squares of the result, which a norm needs: for every 65,536 elements in float64, in a fixed order of
additions. Element ``j`` is added to lane ``j % 1024``, and the lanes are added in halves. It is the order of
``meshfold.kernels.sum_of_squares``, so that a norm has the same bits whatever has carried its gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SQUARED_TOGETHER = 65536
"""Elements whose squares are one number."""

LANES = 1024

_HALF = (torch.float16, torch.bfloat16)
_SQUARED = (torch.float32, *_HALF)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that parts of a dtype are summed in."""
    return torch.float32 if dtype in _HALF else dtype


def has_exact_squares(dtype: torch.dtype) -> bool:
    """Return True if squares of a dtype are exact in float64: others are not summed here."""
    return dtype in _SQUARED


def sum_parts(
    parts: Tensor, own: Tensor, index: int, out: Tensor, *, squares: Tensor | None = None, stream: int | None = None
) -> Tensor:
    """Write the sum over ranks into ``out``, which is returned.

    Args:
        parts: ``[ranks, n]``, contiguous: what each rank has pushed here; row ``index`` is not read.
        own: ``[n]``, contiguous: the part of this rank itself.
        index: this rank's place in the group.
        out: ``[n]``, contiguous, of any floating dtype. The sum is rounded to it once.
        squares: ``[⌈n / 65536⌉]``, float64, of an ``out`` with exact squares: gets those of what is written to ``out``.
        stream: of the GPU, for its driver, that the sum is queued on; by default the current one.
    """
    if out.is_cuda and parts.dtype in _SQUARED:
        from meshfold.mesh.collectives.push.part_sums_triton import sum_parts_triton

        return sum_parts_triton(parts, own, index, out, squares=squares, stream=stream)
    return sum_parts_reference(parts, own, index, out, squares=squares)


def sum_parts_reference(
    parts: Tensor, own: Tensor, index: int, out: Tensor, *, squares: Tensor | None = None
) -> Tensor:
    """Compute :func:`sum_parts` by torch, one addition a rank."""
    total = torch.zeros_like(own, dtype=sum_dtype(own.dtype))
    for rank in range(parts.shape[0]):
        total += own if rank == index else parts[rank]
    out.copy_(total)
    if squares is not None:
        squares.copy_(_squares(out))
    return out


def _squares(x: Tensor) -> Tensor:
    """``n -> ⌈n / 65536⌉``: sums of squares, float64."""
    blocks = -(-x.numel() // SQUARED_TOGETHER)
    rows = F.pad(x, (0, blocks * SQUARED_TOGETHER - x.numel())).view(blocks, -1, LANES)
    lanes = torch.zeros(blocks, LANES, dtype=torch.float64, device=x.device)
    for row in range(rows.shape[1]):
        lanes += rows[:, row].double().square()
    while lanes.shape[1] > 1:
        first, second = lanes.chunk(2, dim=1)
        lanes = first + second
    return lanes.view(blocks)
