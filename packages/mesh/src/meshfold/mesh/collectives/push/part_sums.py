"""The sum of the parts that ranks have pushed: in float32 for half precision, in the order of the ranks, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that parts of a dtype are summed in."""
    return torch.float32 if dtype in _HALF else dtype


def sum_parts(parts: Tensor, own: Tensor, index: int, out: Tensor, *, stream: int | None = None) -> Tensor:
    """Write the sum over ranks into ``out``, which is returned.

    Args:
        parts: ``[ranks, n]``, contiguous: what each rank has pushed here; row ``index`` is not read.
        own: ``[n]``, contiguous: the part of this rank itself.
        index: this rank's place in the group.
        out: ``[n]``, contiguous, of any floating dtype. The sum is rounded to it once.
        stream: of the GPU, for its driver, that the sum is queued on; by default the current one.
    """
    if out.is_cuda and parts.dtype in (*_HALF, torch.float32):
        from meshfold.mesh.collectives.push.part_sums_triton import sum_parts_triton

        return sum_parts_triton(parts, own, index, out, stream)
    return sum_parts_reference(parts, own, index, out)


def sum_parts_reference(parts: Tensor, own: Tensor, index: int, out: Tensor) -> Tensor:
    """Compute :func:`sum_parts` by torch, one addition a rank."""
    total = torch.zeros_like(own, dtype=sum_dtype(own.dtype))
    for rank in range(parts.shape[0]):
        total += own if rank == index else parts[rank]
    return out.copy_(total)
