"""Grouped matmul with its gradients: each run of rows times the matrix of its expert.

In compiled code the launch is opaque to the compiler: torch traces its own operation only in bfloat16, and Inductor of torch 2.11
fails on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.experts.expert_rows import RowSource
from meshfold.kernels import grouped_product, grouped_shape, once_differentiable, take_rows


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    counts: Sequence[int] | None = None,
    source: RowSource | None = None,
) -> Tensor:
    """Multiply the rows of each expert by its matrix: ``[m, a], [e, a, b] -> [m, b]``.

    Args:
        x: rows sorted by expert.
        weight: a matrix for each expert; a transposed view costs nothing.
        ends: [e] int32: the row after the last of each expert. Rows after ``ends[-1]`` are not read; their results are undefined.
        counts: rows of each expert, if the host knows them; then the loop needs no synchronisation.
        source: of x; backward copies x from it again, and only the source is kept.

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
    if source is None:
        y: Tensor = _Grouped.apply(x, weight, ends, counts)
        return y
    again: Tensor = _Grouped.apply(x, weight, ends, counts, source.tokens, source.pairs, source.places)
    return again


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, counts: Sequence[int] | None, *source: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weight, ends, *(source or (x,)))
        ctx.counts = counts
        return _rows_times(x, weight, ends, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        weight, ends, x, *taken_by = ctx.saved_tensors
        dy = dy.contiguous()
        needs_x, needs_weight, *more = ctx.needs_input_grad
        dx = _rows_times(dy, weight.transpose(1, 2), ends, ctx.counts) if needs_x else None
        dweight = None
        if needs_weight:
            if taken_by:
                pairs, places = taken_by
                x = take_rows(x.to(dy.dtype), pairs, places)  # the source has the dtype from before autocast
            dweight = _outer(x, dy, weight, ends, ctx.counts)
        return dx, dweight, *(None for _ in more)


def _rows_times(x: Tensor, weight: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    return _product(x.contiguous(), weight, ends, counts)


def _outer(x: Tensor, dy: Tensor, weight: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Return the gradient of the weights ``[e, a, b]``, in the weights' memory layout."""
    turned = weight.stride(1) < weight.stride(2)  # the parameter is [e, b, a]
    left, right = (dy, x.contiguous()) if turned else (x.contiguous(), dy)
    found = _product(left.t(), right, ends, counts)
    return found.transpose(1, 2) if turned else found


def _product(left: Tensor, right: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Return the product of each run: ``[m, a], [e, a, b] -> [m, b]`` or ``[a, m], [m, b] -> [e, a, b]``."""
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.meshfold.grouped_product(left, right, ends, counts)
        return found
    return grouped_product(left, right, ends, counts)


@torch.library.custom_op("meshfold::grouped_product", mutates_args=())
def _opaque_product(left: Tensor, right: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    return grouped_product(left, right, ends, counts).contiguous()


@_opaque_product.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    return left.new_empty(grouped_shape(left, right, ends))
