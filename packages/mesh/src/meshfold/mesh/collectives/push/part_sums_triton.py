"""The sum of parts as one Triton kernel, which reads every part once and can add up the squares of what it writes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.mesh.collectives.push.part_sums import LANES, SQUARED_TOGETHER

_BLOCK = 4096
_ROWS = 4  # rows of lanes loaded at a time, so that rows do not wait for memory one by one


@triton.jit
def _total(parts, own, elements, at, mask, INDEX: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Σ rows of parts, with own instead of row INDEX, in float32."""
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == INDEX:
            total += tl.load(own + at, mask=mask, other=0.0).to(tl.float32)
        else:  # .cg: a peer wrote it, so data that this multiprocessor has cached must not be used
            row = parts + tl.cast(elements, tl.int64) * rank
            total += tl.load(row + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def _sum(parts, own, out, elements, INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    total = _total(parts, own, elements, at, mask, INDEX, RANKS, BLOCK)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_and_squares(
    parts,
    own,
    out,
    squares,
    elements,
    INDEX: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """``_sum``, and the squares of a block of what it writes, in the order that part_sums.py has."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.zeros([LANES], tl.float64)
    for row in range(0, BLOCK, LANES * ROWS):
        for k in tl.static_range(ROWS):
            at = begin + row + k * LANES + tl.arange(0, LANES)
            mask = at < elements
            rounded = _total(parts, own, elements, at, mask, INDEX, RANKS, LANES).to(out.dtype.element_ty)
            tl.store(out + at, rounded, mask=mask)
            wide = rounded.to(tl.float32).to(tl.float64)
            lanes += wide * wide
    # Two numbers have one order of summation, so this tree is deterministic.
    for k in tl.static_range(HALVINGS):
        lanes = tl.sum(tl.reshape(lanes, (2, LANES >> (k + 1))), axis=0)
    tl.store(squares + tl.program_id(0) + tl.arange(0, 1), lanes)


_compiled: dict[tuple[object, ...], Any] = {}  # kernels, by all that Triton compiles them for


def sum_parts_triton(
    parts: Tensor, own: Tensor, index: int, out: Tensor, *, squares: Tensor | None = None, stream: int | None = None
) -> Tensor:
    """Compute :func:`~meshfold.mesh.collectives.push.part_sums.sum_parts`.

    Triton takes tens of microseconds to find what it has compiled for the types, alignments and sizes of arguments. Blocks that
    are aligned, and whose length is a multiple of 16, share a kernel, which is launched directly.
    """
    elements, ranks = own.numel(), parts.shape[0]
    if not elements:
        return out
    given: list[Tensor | int]
    if squares is None:
        function, given, settings = _sum, [parts, own, out], [index, ranks, _BLOCK]
    else:
        function, given = _sum_and_squares, [parts, own, out, squares]
        settings = [index, ranks, SQUARED_TOGETHER, LANES, _ROWS, LANES.bit_length() - 1]
    grid = (triton.cdiv(elements, settings[2]), 1, 1)
    addresses = [one.data_ptr() for one in (parts, own, out)]
    is_regular = not elements % 16 and elements < 2**31 and not any(address % 16 for address in addresses)
    key: tuple[object, ...] = (function, parts.dtype, out.dtype, index, ranks, out.device)
    if squares is not None:  # its alignment may be 8 bytes
        addresses.append(squares.data_ptr())
        key += (addresses[-1] % 16,)
    kernel = _compiled.get(key) if is_regular and stream is not None else None
    if kernel is not None and out.device.index == torch.cuda.current_device():
        kernel[grid](*addresses, elements, *settings, stream=stream)
        return out
    with torch.cuda.device_of(out), _on(stream, out):
        kernel = function[grid](*given, elements, *settings, num_warps=8, enable_fp_fusion=False)
    if is_regular and kernel is not None:  # None: Triton interprets
        _compiled[key] = kernel
    return out


def _on(stream: int | None, out: Tensor) -> AbstractContextManager[object]:
    if stream is None or stream == torch.cuda.current_stream(out.device).cuda_stream:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, out.device))
