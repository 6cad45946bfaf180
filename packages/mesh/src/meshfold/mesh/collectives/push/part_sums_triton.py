"""The sum of parts as one Triton kernel, which reads every part once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _sum(parts, own, out, elements, INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """out = Σ rows of parts, with own instead of row INDEX, in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == INDEX:
            total += tl.load(own + at, mask=mask, other=0.0).to(tl.float32)
        else:  # .cg: a peer wrote it, so nothing that this multiprocessor has read before may stand for it
            row = parts + tl.cast(elements, tl.int64) * rank
            total += tl.load(row + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def sum_parts_triton(parts: Tensor, own: Tensor, index: int, out: Tensor) -> Tensor:
    """Compute :func:`~meshfold.mesh.collectives.push.part_sums.sum_parts`."""
    elements = own.numel()
    if elements:
        grid = (triton.cdiv(elements, _BLOCK),)
        with torch.cuda.device_of(out):
            _sum[grid](parts, own, out, elements, INDEX=index, RANKS=parts.shape[0], BLOCK=_BLOCK, num_warps=8)
    return out
