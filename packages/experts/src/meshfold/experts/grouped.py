"""Grouped matmul: each run of rows times the matrix of its expert, in one launch where torch has it.

``torch.nn.functional.grouped_mm`` takes bfloat16, float16 and float32 whose rows lie at multiples of 16 bytes. All else,
float64 above all, is a loop over experts, which reads the sizes of the runs on the host unless they are known there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Multiply the rows of each expert by its matrix: ``[m, a], [e, a, b] -> [m, b]``.

    Args:
        x: rows sorted by expert.
        weight: a matrix for each expert; a transposed view costs nothing.
        ends: [e] int32: the row after the last of each expert. What rows after ``ends[-1]`` give is undefined.
        counts: rows of each expert, where the host knows them; spares the loop a synchronisation.

    Returns:
        in the dtype of x; gradients of experts without rows are zero.

    Raises:
        ValueError: if the shapes do not fit.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or ends.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_matmul takes [m, a], [e, a, b] and ends [e], got {list(x.shape)}, {list(weight.shape)} and {list(ends.shape)}"
        )
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    y: Tensor = _Grouped.apply(x, weight, ends, counts)
    return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.counts = counts
        return _rows_times(x, weight, ends, counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        dy = dy.contiguous()
        needs_x, needs_weight, _, _ = ctx.needs_input_grad
        dx = _rows_times(dy, weight.transpose(1, 2), ends, ctx.counts) if needs_x else None
        dweight = _outer(x, dy, weight, ends, ctx.counts) if needs_weight else None
        return dx, dweight, None, None


def _rows_times(x: Tensor, weight: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    x = x.contiguous()
    if _fits(x, weight):
        return torch.nn.functional.grouped_mm(x, weight, offs=ends)
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for expert, begin, end in _runs(ends, counts):
        torch.mm(x[begin:end], weight[expert], out=y[begin:end])
    return y


def _outer(x: Tensor, dy: Tensor, weight: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Return the gradient of the weights ``[e, a, b]``, in the weights' memory layout."""
    turned = weight.stride(1) < weight.stride(2)  # the parameter is [e, b, a]
    left, right = (dy, x.contiguous()) if turned else (x.contiguous(), dy)
    if _fits(x, weight) and x.shape[0]:
        found = torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    else:
        found = x.new_zeros(weight.shape[0], left.shape[1], right.shape[1])
        for expert, begin, end in _runs(ends, counts):
            torch.mm(left[begin:end].t(), right[begin:end], out=found[expert])
    return found.transpose(1, 2) if turned else found


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch's grouped_mm takes these. Meta tensors take the loop, whose matmuls a FLOP counter knows."""
    if torch.compiler.is_compiling() and x.dtype is not torch.bfloat16:  # torch traces it only in bfloat16
        return False
    each = x.element_size()
    return (
        not x.is_meta
        and x.dtype in _DTYPES
        and weight.dtype is x.dtype
        and x.shape[0] > 0
        and all(size * each % _ALIGNMENT == 0 for size in weight.shape[1:])
        and all(t.storage_offset() * each % _ALIGNMENT == 0 for t in (x, weight))
        and weight.stride(1 if weight.stride(1) < weight.stride(2) else 2) == 1
    )


def _runs(ends: Tensor, counts: Sequence[int] | None) -> list[tuple[int, int, int]]:
    """Return expert, first row and the row after the last, of experts that have rows."""
    stops: list[int] = []
    if counts is None:
        stops = ends.tolist()
    else:
        for count in counts:
            stops.append((stops[-1] if stops else 0) + count)
    begins = [0, *stops[:-1]]
    return [(e, begin, end) for e, (begin, end) in enumerate(zip(begins, stops, strict=True)) if end > begin]
