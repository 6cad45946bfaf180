"""Products of experts fused with what stands beside them: the gather of tokens, the gated activation, its gradient.

Rows are sorted by expert; ``ends[e]`` is the row after the last of expert e. A row's token is ``tokens[row]``. None: the operand
has the rows themselves.

    gated_rows            both = x[tokens] @ gate_up[e]^T,  hidden = silu(gate) * up * weight of the row
    gated_row_gradients   d = dy[tokens] @ down[e],         the gradients of both and of the weight
    rows_times            x @ matrix[e]
    outer_rows            left[tokens]^T @ right[tokens]    of the rows of each expert: the gradient of its matrix

These are pieces without a backward. Products accumulate in float32; ``both`` is rounded before the activation, as in the separate
operations. Rows after ``ends[-1]`` are not written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.activations import weighted_gated, weighted_gradients
from meshfold.kernels.inputs import compute_dtype


class ProductTile(NamedTuple):
    """The tile of a Triton product.

    Attributes:
        rows, columns: of the result. ``gated_rows`` computes as many columns, half of them of the gate.
        inner: of the sum, for each step.
        warps, stages: of Triton.
    """

    rows: int
    columns: int
    inner: int = 64
    warps: int = 8
    stages: int = 3


def gated_rows(
    x: Tensor, tokens: Tensor | None, gate_up: Tensor, ends: Tensor, weights: Tensor, tile: ProductTile
) -> tuple[Tensor, Tensor]:
    """Return both ``[m, 2·f]`` and hidden ``[m, f]``.

    Args:
        x: [n, h] if there are ``tokens``, else [m, h].
        tokens: [m] int32.
        gate_up: [e, 2·f, h], contiguous; the gate's rows first.
        ends: [e] int32.
        weights: [m].
        tile: that fits (:func:`tile_fits`).
    """
    return dispatch.piece(gated, x, gate_up)(x, tokens, gate_up, ends, weights, tile)


def gated_row_gradients(
    dy: Tensor, tokens: Tensor | None, down: Tensor, ends: Tensor, both: Tensor, weights: Tensor, tile: ProductTile
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both ``[m, 2·f]`` and of the weights ``[m]``, these in float32 (float64).

    Args:
        dy: [n, h] if there are ``tokens``, else [m, h].
        tokens: [m] int32.
        down: [e, h, f], contiguous.
        ends: [e] int32.
        both: [m, 2·f], of :func:`gated_rows`.
        weights: [m].
        tile: that fits (:func:`tile_fits`).
    """
    return dispatch.piece(gated_gradients, dy, down)(dy, tokens, down, ends, both, weights, tile)


def rows_times(x: Tensor, matrix: Tensor, ends: Tensor, tile: ProductTile) -> Tensor:
    """Return ``[m, b]``.

    Args:
        x: [m, a].
        matrix: [e, a, b], or a view of ``[e, b, a]``.
        ends: [e] int32.
        tile: that fits.
    """
    return dispatch.piece(times, x, matrix)(x, matrix, ends, tile)


def outer_rows(
    left: Tensor,
    left_tokens: Tensor | None,
    right: Tensor,
    right_tokens: Tensor | None,
    ends: Tensor,
    tile: ProductTile,
) -> Tensor:
    """Return ``[e, a, b]``: zeros for experts without rows.

    Args:
        left, right: [.., a] and [.., b], with rows of tokens if there are tokens for them.
        left_tokens, right_tokens: [m] int32.
        ends: [e] int32.
        tile: that fits (:func:`tile_fits`).
    """
    return dispatch.piece(outer, left, right)(left, left_tokens, right, right_tokens, ends, tile)


def tile_fits(tile: ProductTile, rows: int | None, columns: int, inner: int | None) -> bool:
    """Return True if a result of this size consists of whole tiles; None for a size that varies from expert to expert."""
    return (
        (rows is None or rows % tile.rows == 0)
        and columns % tile.columns == 0
        and (inner is None or inner % tile.inner == 0)
    )


# The reference in plain torch: it defines every result and the signatures of the Triton version.


def gated(
    x: Tensor, tokens: Tensor | None, gate_up: Tensor, ends: Tensor, weights: Tensor, tile: ProductTile
) -> tuple[Tensor, Tensor]:
    """Return both and hidden."""
    rows = x if tokens is None else x.index_select(0, tokens)
    both = rows.new_empty(rows.shape[0], gate_up.shape[1])
    for expert, begin, end in _runs(ends):
        both[begin:end] = _product(rows[begin:end], gate_up[expert].t())
    gate, up = both.chunk(2, 1)
    return both, weighted_gated(gate, up, weights)


def gated_gradients(
    dy: Tensor, tokens: Tensor | None, down: Tensor, ends: Tensor, both: Tensor, weights: Tensor, tile: ProductTile
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both and of the weights. That of hidden is not rounded."""
    rows = dy if tokens is None else dy.index_select(0, tokens)
    dhidden = rows.new_empty(rows.shape[0], down.shape[2], dtype=compute_dtype(rows))
    for expert, begin, end in _runs(ends):
        dhidden[begin:end] = rows[begin:end].to(dhidden.dtype) @ down[expert].to(dhidden.dtype)
    dboth = torch.empty_like(both)
    (gate, up), (dgate, dup) = both.chunk(2, 1), dboth.chunk(2, 1)
    return dboth, weighted_gradients(dhidden, gate, up, weights, dgate, dup)


def times(x: Tensor, matrix: Tensor, ends: Tensor, tile: ProductTile) -> Tensor:
    """Return the product of each expert's rows with its matrix."""
    y = x.new_empty(x.shape[0], matrix.shape[2])
    for expert, begin, end in _runs(ends):
        y[begin:end] = _product(x[begin:end], matrix[expert])
    return y


def outer(
    left: Tensor,
    left_tokens: Tensor | None,
    right: Tensor,
    right_tokens: Tensor | None,
    ends: Tensor,
    tile: ProductTile,
) -> Tensor:
    """Return the product of each expert's rows."""
    left = left if left_tokens is None else left.index_select(0, left_tokens)
    right = right if right_tokens is None else right.index_select(0, right_tokens)
    y = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for expert, begin, end in _runs(ends):
        y[expert] = _product(left[begin:end].t(), right[begin:end])
    return y


def _product(a: Tensor, b: Tensor) -> Tensor:
    dtype = compute_dtype(a)
    return (a.to(dtype) @ b.to(dtype)).to(a.dtype)


def _runs(ends: Tensor) -> list[tuple[int, int, int]]:
    """Return expert, first row and the row after the last."""
    stops: list[int] = ends.tolist()
    return [(e, begin, end) for e, (begin, end) in enumerate(zip([0, *stops], stops, strict=False))]
