"""Tokens copied into rows, one for each expert or rank that works on them, and rows summed back into tokens.

A token has up to j rows. ``places[t, i]`` is the row of its i-th pair, or -1 for none; ``pairs[row]`` is the pair t·j + i of a row:
each the inverse of the other. :func:`take_rows` and :func:`sum_rows` without weights are adjoint. :func:`take_weighted_rows` copies
a number of each pair, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.functions import as_dtype, once_differentiable
from meshfold.kernels.inputs import compute_dtype


def take_rows(x: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
    """Copy each token to its rows: ``[n, h] -> [m, h]``. Rows that no place names are undefined.

    Args:
        x: [n, h].
        pairs: [m], whole numbers; a row that no place names may have any pair.
        places: [n, j], whole numbers from -1 to m - 1. The gradient of a token is the sum over its places.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(places, pairs, x.shape[0])
    y: Tensor = _Take.apply(x, pairs, places)
    return y


def take_weighted_rows(x: Tensor, weights: Tensor, pairs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Copy each token and the weights of its pairs to its rows: ``[n, h], [n, j] -> [m, h], [m]``, in one pass, as backward is.

    Args:
        x, pairs, places: as of :func:`take_rows`.
        weights: [n, j].

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(places, pairs, x.shape[0])
    if weights.shape != places.shape:
        raise ValueError(f"weights must be [n, j] as places are, {list(places.shape)}, got {list(weights.shape)}")
    y, of_rows = _TakeWeighted.apply(x, weights, pairs, places)
    return y, of_rows


def sum_rows(rows: Tensor, pairs: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum the rows of each token, weighted: ``[m, h] -> [n, h]``, in the dtype of ``rows``.

    Args:
        rows: [m, h]; those that no place names are not read. Without weights their gradient is undefined.
        pairs: [m], whole numbers.
        places: [n, j], whole numbers from -1 to m - 1.
        weights: [n, j], or None for ones.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(places, pairs, places.shape[0])
    if rows.shape[0] != pairs.shape[0] or (weights is not None and weights.shape != places.shape):
        raise ValueError(
            f"rows must be [m, h] beside pairs [m], weights [n, j] beside places [n, j], got rows {list(rows.shape)}, pairs "
            f"{list(pairs.shape)}, weights {None if weights is None else list(weights.shape)}, places {list(places.shape)}"
        )
    y: Tensor = _Sum.apply(rows, pairs, places, weights)
    return y


@torch.no_grad()
def add_rows_(y: Tensor, rows: Tensor, pairs: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Add the rows of each token to it in place, as :func:`sum_rows` sums them: ``[n, h], [m, h] -> [n, h]``.

    Tokens without a row are neither read nor written, so few rows take little time. There is no backward: that of
    :func:`sum_rows` is the rows'.

    Args:
        y: [n, h], contiguous, in the dtype of ``rows``.
        rows, pairs, places, weights: as of :func:`sum_rows`.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check(places, pairs, y.shape[0])
    if rows.shape != (pairs.shape[0], y.shape[1]) or rows.dtype is not y.dtype or not y.is_contiguous():
        raise ValueError(
            f"add_rows_ takes a contiguous [n, h] and rows [m, h] of its dtype beside pairs [m], got {list(y.shape)} {y.dtype}, "
            f"rows {list(rows.shape)} {rows.dtype} and pairs {list(pairs.shape)}"
        )
    dispatch.twin(add_summed, rows)(y, rows, pairs, places, weights)
    return y


def _check(places: Tensor, pairs: Tensor, tokens: int) -> None:
    if places.dim() != 2 or pairs.dim() != 1 or places.shape[0] != tokens:
        raise ValueError(
            f"places must be [n, j] and pairs [m], for {tokens} tokens, got places {list(places.shape)}, pairs {list(pairs.shape)}"
        )


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(pairs, places)
        ctx.summed = dispatch.twin(summed, x)
        return dispatch.twin(taken, x)(x, pairs, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        pairs, places = ctx.saved_tensors
        return ctx.summed(dy, pairs, places, None), None, None


class _TakeWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, pairs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(pairs, places)
        ctx.gradients = dispatch.twin(weighted_take_gradients, x)
        return dispatch.twin(taken_weighted, x)(x, weights, pairs, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dof_rows: Tensor) -> Any:
        pairs, places = ctx.saved_tensors
        return *ctx.gradients(dy, dof_rows, pairs, places), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(None if weights is None else rows, pairs, places, weights)
        ctx.taken, ctx.gradients = dispatch.twin(taken, rows), dispatch.twin(sum_gradients, rows)
        return dispatch.twin(summed, rows)(rows, pairs, places, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        rows, pairs, places, weights = ctx.saved_tensors
        if weights is None:
            return ctx.taken(dy, pairs, places), None, None, None
        drows, dweights = ctx.gradients(dy, rows, pairs, places, weights)
        return drows, None, None, dweights


# The reference in plain torch: it defines every result and the signatures of the Triton version.


def taken(x: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
    """``n h -> m h``: the token of each row that a place names; other rows are undefined."""
    return x.index_select(0, pairs // places.shape[1])


def taken_weighted(x: Tensor, weights: Tensor, pairs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """``n h, n j -> m h, m``: the token and the weight of each row that a place names; others are undefined."""
    return taken(x, pairs, places), weights.flatten().index_select(0, pairs)


def weighted_take_gradients(dy: Tensor, dof_rows: Tensor, pairs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """``m h, m -> n h, n j``: the sum over the rows of each token, and the number of the row of each place, zero without one."""
    numbers = F.pad(dof_rows, (0, 1))  # place -1 is the zero behind the rows
    return summed(dy, pairs, places, None), numbers[places.long()]


def summed(rows: Tensor, pairs: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """``m h -> n h``: the sum over the rows of each token, computed in float32 (float64), in the dtype of rows."""
    tokens, each = places.shape
    dtype = compute_dtype(rows)
    kept = rows.to(dtype).masked_fill(_unnamed(pairs, places).unsqueeze(1), 0.0)
    if weights is not None:
        kept = kept * weights.to(dtype).flatten().index_select(0, pairs).unsqueeze(1)
    y = torch.zeros(tokens, rows.shape[1], dtype=dtype, device=rows.device)
    return as_dtype(y.index_add(0, pairs // each, kept), rows.dtype)  # not in place: see as_dtype


def add_summed(y: Tensor, rows: Tensor, pairs: Tensor, places: Tensor, weights: Tensor | None) -> None:
    """Add the sum over the rows of each token to ``y``, ``n h``, where it has any."""
    dtype = compute_dtype(rows)
    y.copy_(y.to(dtype) + summed(rows.to(dtype), pairs, places, weights))


def sum_gradients(dy: Tensor, rows: Tensor, pairs: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows ``m h`` and weights ``n j``, in their dtypes."""
    dtype = compute_dtype(rows)
    unnamed = _unnamed(pairs, places)
    per_row = taken(dy, pairs, places).to(dtype)
    weight = weights.to(dtype).flatten().index_select(0, pairs)
    dots = (per_row * rows.to(dtype)).sum(1).masked_fill(unnamed, 0.0)
    # Rows that no place names may share a pair with other rows; they add zero.
    dweights = torch.zeros(weights.numel(), dtype=dtype, device=rows.device).index_add_(0, pairs, dots)
    drows = (per_row * weight.unsqueeze(1)).masked_fill(unnamed.unsqueeze(1), 0.0)
    return drows.to(rows.dtype), dweights.view(weights.shape).to(weights.dtype)


def _unnamed(pairs: Tensor, places: Tensor) -> Tensor:
    """Return a mask ``m`` of the rows that no place names."""
    rows = torch.arange(pairs.shape[0], device=pairs.device)
    return places.flatten().index_select(0, pairs) != rows if pairs.shape[0] else rows.bool()
