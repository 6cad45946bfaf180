"""Dropout whose mask is a function of (seed, key, global element index), so that every layout drops the same elements.

Element (r, c) of the local rows has the global index ``row(r) * global_cols + col_offset + c``. Its 64 bits come from
:mod:`meshfold.kernels.random_bits`; the top 24 of them over 2**24 are a uniform number. The element is kept if that is >= p, and
then scaled by 1 / (1 - p). The reference, numba and Triton keep the very same elements. The mask is never
stored: the backward recomputes it. Source of dropout: Srivastava et al., JMLR 2014.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.functions import once_differentiable
from meshfold.kernels.inputs import as_rows, compute_dtype, result_of_shape
from meshfold.kernels.random_bits import bits_of, plain, stream, top24


def dropout(
    x: Tensor,
    p: float,
    seed: int | Tensor,
    key: int | Tensor,
    rows: int | Tensor = 0,
    col_offset: int = 0,
    global_cols: int | None = None,
    training: bool = True,
) -> Tensor:
    """Dropout by global element: ``... c -> ... c``.

    Args:
        x: local rows of c elements; all leading dims together count as rows.
        p: share of elements to drop, 0 to 1.
        seed: the run's seed; an integer or a 0-d int64 tensor.
        key: identifies the dropout, for example a hash of the layer's name and the step; an integer or a 0-d int64 tensor.
        rows: global number of the first local row if rows are consecutive, otherwise an int64 tensor with the global number of
            every local row.
        col_offset: global number of the first local column.
        global_cols: width of a global row, in elements; None for c.
        training: False returns ``x`` itself, as p = 0 does.

    Returns:
        The shape and dtype of ``x``; computed in float32 (float64) and rounded once.

    Raises:
        ValueError: if p is not in [0, 1], the columns are not in the global row, or ``rows`` has another length.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p is {p}; give the fraction of elements to drop, from 0 to 1")
    columns = x.shape[-1]
    global_cols = columns if global_cols is None else global_cols
    if col_offset < 0 or col_offset + columns > global_cols:
        raise ValueError(
            f"columns {col_offset} to {col_offset + columns} do not lie in a row of global_cols = {global_cols}"
        )
    if isinstance(rows, Tensor):
        rows = rows.reshape(-1)
        if rows.dtype is not torch.int64 or rows.shape[0] != x.shape[:-1].numel():
            raise ValueError(
                f"rows must be int64 with one number for each of the {x.shape[:-1].numel()} rows, "
                f"got {rows.shape[0]} of {rows.dtype}"
            )
    if not training or p == 0.0:
        return x
    # uniform >= p  <=>  top 24 bits >= p * 2**24  <=>  top 24 bits >= its ceiling. Integers are exact on every device.
    threshold = math.ceil(p * (1 << 24))
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    state = stream(seed, key, x.device)
    if torch.compiler.is_compiling():
        dropped = drop(as_rows(x), threshold, scale, state, rows, col_offset, global_cols)
        return dropped.reshape(x.shape)
    y: Tensor = _Dropout.apply(x, threshold, scale, state, rows, col_offset, global_cols)
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        """Apply :func:`drop` with these arguments after ``x``."""
        ctx.drop = dispatch.twin(drop, x)
        # A plain attribute suffices: state and row numbers are neither inputs nor outputs.
        ctx.arguments = arguments
        return result_of_shape(ctx.drop(as_rows(x), *arguments), x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = ctx.drop(as_rows(dy), *ctx.arguments)
        return dx.reshape(dy.shape), *(None for _ in ctx.arguments)


# The reference in plain torch: it defines every result and the signatures of the Triton and numba versions.


def drop(
    x: Tensor,
    threshold: int,
    scale: float,
    state: int | Tensor,
    rows: int | Tensor,
    col_offset: int,
    global_cols: int,
) -> Tensor:
    """``m c -> m c``: x * scale where the top 24 bits of the element reach ``threshold``, else 0; differentiable.

    ``state`` is the stream's (an int64), ``rows`` the number of the first row or an int64 tensor ``m``.
    """
    count, columns = x.shape
    row = rows if isinstance(rows, Tensor) else plain(torch.arange(count, device=x.device)) + rows
    column = plain(torch.arange(columns, device=x.device)) + col_offset
    index = (row * global_cols).unsqueeze(1) + column
    return scaled(x, top24(bits_of(state, index)) >= threshold, scale)


def scaled(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """x * scale where kept, else 0 (also for an infinite or NaN x)."""
    wide = x.to(compute_dtype(x)) * scale
    return torch.where(keep, wide, 0.0).to(x.dtype)
