"""The sum of parts as one Triton kernel, which reads every part once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

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


_compiled: dict[tuple[object, ...], Any] = {}  # kernels, by all that Triton compiles them for


def sum_parts_triton(parts: Tensor, own: Tensor, index: int, out: Tensor, stream: int | None = None) -> Tensor:
    """Compute :func:`~meshfold.mesh.collectives.push.part_sums.sum_parts`.

    Triton takes tens of microseconds to find what it has compiled for the types, alignments and sizes of arguments. Blocks that
    are aligned, and whose length is a multiple of 16, share a kernel, which is launched directly.
    """
    elements, ranks = own.numel(), parts.shape[0]
    if not elements:
        return out
    grid = (triton.cdiv(elements, _BLOCK), 1, 1)
    addresses = (parts.data_ptr(), own.data_ptr(), out.data_ptr())
    is_regular = not elements % 16 and elements < 2**31 and not any(address % 16 for address in addresses)
    key = (parts.dtype, own.dtype, out.dtype, index, ranks, out.device)
    kernel = _compiled.get(key) if is_regular and stream is not None else None
    if kernel is not None and out.device.index == torch.cuda.current_device():
        kernel[grid](*addresses, elements, index, ranks, _BLOCK, stream=stream)
        return out
    with torch.cuda.device_of(out), _on(stream, out):
        kernel = _sum[grid](parts, own, out, elements, INDEX=index, RANKS=ranks, BLOCK=_BLOCK, num_warps=8)
    if is_regular and kernel is not None:  # None: Triton interprets
        _compiled[key] = kernel
    return out


def _on(stream: int | None, out: Tensor) -> AbstractContextManager[object]:
    if stream is None or stream == torch.cuda.current_stream(out.device).cuda_stream:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, out.device))
