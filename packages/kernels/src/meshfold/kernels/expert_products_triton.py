"""Products of experts in Triton, for the tensor cores of a Hopper GPU: a program takes a tile of one expert.

Which expert a tile of rows belongs to is on the device. One small launch lists the tiles; their number is bounded by
``m / rows + experts``, and programs of tiles that do not exist end at once. Loads of a tile are not masked: rows beyond an
expert's last read its first one, and are not stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.expert_products import ProductTile

_LISTED = 32  # tiles that a program lists


@triton.jit(do_not_specialize=["most"])
def _list_tiles(
    ends, tile_experts, tile_rows, tile_ends, most, experts, ROWS: tl.constexpr, LISTED: tl.constexpr, E: tl.constexpr
):
    """Write the expert, the first row and the row after the expert's last of each tile of ROWS rows.

    The expert of tiles that do not exist is the number of experts.
    """
    expert = tl.arange(0, E)
    exists = expert < experts
    end = tl.load(ends + expert, mask=exists, other=0)
    start = tl.load(ends + expert - 1, mask=exists & (expert > 0), other=0)
    tiles = tl.where(exists, (end - start + ROWS - 1) // ROWS, 0)
    after = tl.cumsum(tiles, 0)
    tile = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    own = tl.sum((exists[None, :] & (after[None, :] <= tile[:, None])).to(tl.int32), 1)
    first = start - (after - tiles) * ROWS
    row = tile * ROWS + tl.sum(tl.where(expert[None, :] == own[:, None], first[None, :], 0), 1)
    tl.store(tile_experts + tile, own, mask=tile < most)
    tl.store(tile_rows + tile, row, mask=tile < most)
    last = tl.sum(tl.where(expert[None, :] == own[:, None], end[None, :], 0), 1)
    tl.store(tile_ends + tile, last, mask=tile < most)


@triton.jit
def _sources(tokens, row, GATHERS: tl.constexpr):
    """Return the rows of an operand, int64."""
    if GATHERS:
        return tl.load(tokens + row).to(tl.int64)
    return row.to(tl.int64)


@triton.jit
def _gated(
    x,
    tokens,
    gate_up,
    tile_experts,
    tile_rows,
    tile_ends,
    weights,
    both,
    hidden,
    experts,
    inner,
    ffn,
    x_row,
    GATHERS: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    HALF: tl.constexpr = N // 2
    across = ffn // HALF
    tile = tl.program_id(0) // across
    expert = tl.load(tile_experts + tile)
    if expert < experts:
        first = tl.load(tile_rows + tile)
        end = tl.load(tile_ends + tile)
        row = first + tl.arange(0, M)
        real = row < end
        source = _sources(tokens, tl.where(real, row, first), GATHERS)
        start = (tl.program_id(0) % across) * HALF
        # The gate's columns, then those of up: one product gives both.
        column = tl.arange(0, N)
        matrix_row = start + column % HALF + (column // HALF) * ffn
        k = tl.arange(0, K)
        left = x + source[:, None] * x_row + k[None, :]
        right = (
            gate_up + expert.to(tl.int64) * (2 * ffn * inner) + matrix_row.to(tl.int64)[None, :] * inner + k[:, None]
        )
        acc = tl.zeros((M, N), dtype=tl.float32)
        for _ in range(0, inner, K):
            a = tl.load(left)
            b = tl.load(right)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            left += K
            right += K
        gate, up = _halves(acc, M, N)
        gate, up = gate.to(both.dtype.element_ty), up.to(both.dtype.element_ty)
        at = start + tl.arange(0, HALF)[None, :]
        there = both + row.to(tl.int64)[:, None] * (2 * ffn) + at
        tl.store(there, gate, mask=real[:, None])
        tl.store(there + ffn, up, mask=real[:, None])
        weight = tl.load(weights + row, mask=real, other=0.0).to(tl.float32)
        g, u = gate.to(tl.float32), up.to(tl.float32)
        value = g * tl.sigmoid(g) * u * weight[:, None]
        tl.store(hidden + row.to(tl.int64)[:, None] * ffn + at, value.to(hidden.dtype.element_ty), mask=real[:, None])


@triton.jit
def _gated_gradients(
    dy,
    tokens,
    down,
    tile_experts,
    tile_rows,
    tile_ends,
    weights,
    both,
    dboth,
    dweights,
    count,
    experts,
    inner,
    ffn,
    dy_row,
    GATHERS: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    across = ffn // N
    tile = tl.program_id(0) // across
    expert = tl.load(tile_experts + tile)
    if expert < experts:
        first = tl.load(tile_rows + tile)
        end = tl.load(tile_ends + tile)
        row = first + tl.arange(0, M)
        real = row < end
        source = _sources(tokens, tl.where(real, row, first), GATHERS)
        part = tl.program_id(0) % across
        column = part * N + tl.arange(0, N)
        k = tl.arange(0, K)
        left = dy + source[:, None] * dy_row + k[None, :]
        right = down + expert.to(tl.int64) * (inner * ffn) + k[:, None] * ffn + column[None, :]
        acc = tl.zeros((M, N), dtype=tl.float32)
        for _ in range(0, inner, K):
            a = tl.load(left)
            b = tl.load(right)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            left += K
            right += K * ffn
        weight = tl.load(weights + row, mask=real, other=0.0).to(tl.float32)
        at = row.to(tl.int64)[:, None] * (2 * ffn) + part * N
        # Quarter by quarter: a whole tile of gate, up and both gradients does not fit into registers beside the product.
        total = tl.zeros((M,), dtype=tl.float32)
        lower, upper = _halves(acc, M, N)
        for half in tl.static_range(2):
            one, other = _halves(lower if half == 0 else upper, M, N // 2)
            for quarter in tl.static_range(2):
                d = one if quarter == 0 else other
                there = at + ((2 * half + quarter) * (N // 4) + tl.arange(0, N // 4))[None, :]
                total += _back(d, both, dboth, there, ffn, weight, real)
        tl.store(dweights + part.to(tl.int64) * count + row, total, mask=real)


@triton.jit
def _halves(acc, M: tl.constexpr, N: tl.constexpr):
    """Return the first and the last N / 2 columns."""
    return tl.split(tl.permute(tl.reshape(acc, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def _back(d, both, dboth, there, ffn, weight, real):
    """Write the gradients of gate and up for some columns, and return their part of the weights' gradient."""
    g = tl.load(both + there, mask=real[:, None], other=0.0).to(tl.float32)
    u = tl.load(both + there + ffn, mask=real[:, None], other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    activated = g * share
    total = tl.sum(d * activated * u, 1)
    d = d * weight[:, None]
    to_gate = d * u * (share + activated * (1.0 - share))
    tl.store(dboth + there, to_gate.to(dboth.dtype.element_ty), mask=real[:, None])
    tl.store(dboth + there + ffn, (d * activated).to(dboth.dtype.element_ty), mask=real[:, None])
    return total


@triton.jit
def _times(
    x,
    matrix,
    tile_experts,
    tile_rows,
    tile_ends,
    y,
    experts,
    inner,
    wide,
    x_row,
    matrix_expert,
    matrix_inner,
    matrix_wide,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    across = wide // N
    tile = tl.program_id(0) // across
    expert = tl.load(tile_experts + tile)
    if expert < experts:
        first = tl.load(tile_rows + tile)
        end = tl.load(tile_ends + tile)
        row = first + tl.arange(0, M)
        real = row < end
        column = (tl.program_id(0) % across) * N + tl.arange(0, N)
        k = tl.arange(0, K)
        left = x + tl.where(real, row, first).to(tl.int64)[:, None] * x_row + k[None, :]
        right = matrix + expert.to(tl.int64) * matrix_expert + k[:, None] * matrix_inner + column[None, :] * matrix_wide
        acc = tl.zeros((M, N), dtype=tl.float32)
        for _ in range(0, inner, K):
            a = tl.load(left)
            b = tl.load(right)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            left += K
            right += K * matrix_inner
        there = y + row.to(tl.int64)[:, None] * wide + column[None, :]
        tl.store(there, acc.to(y.dtype.element_ty), mask=real[:, None])


@triton.jit
def _outer(
    left,
    left_tokens,
    right,
    right_tokens,
    ends,
    y,
    high,
    wide,
    left_row,
    right_row,
    GATHERS_LEFT: tl.constexpr,
    GATHERS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    across = wide // N
    tiles = (high // M) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    end = tl.load(ends + expert)
    start = 0
    if expert > 0:
        start = tl.load(ends + expert - 1)
    at_left = (tile // across) * M + tl.arange(0, M)
    at_right = (tile % across) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    acc = tl.zeros((M, N), dtype=tl.float32)
    last = tl.maximum(end - 1, 0)
    # The rows of the next step are loaded a step ahead: operands do not wait for them.
    of_left = _sources(left_tokens, tl.minimum(start + k, last), GATHERS_LEFT)
    of_right = _sources(right_tokens, tl.minimum(start + k, last), GATHERS_RIGHT)
    for begin in range(start, end, K):
        real = (begin + k < end)[:, None]
        a = tl.load(left + of_left[:, None] * left_row + at_left[None, :], mask=real, other=0.0)
        b = tl.load(right + of_right[:, None] * right_row + at_right[None, :], mask=real, other=0.0)
        following = tl.minimum(begin + K + k, last)
        of_left = _sources(left_tokens, following, GATHERS_LEFT)
        of_right = _sources(right_tokens, following, GATHERS_RIGHT)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    there = y + expert.to(tl.int64) * high * wide + at_left.to(tl.int64)[:, None] * wide + at_right[None, :]
    tl.store(there, acc.to(y.dtype.element_ty))


def gated(
    x: Tensor, tokens: Tensor | None, gate_up: Tensor, ends: Tensor, weights: Tensor, tile: ProductTile
) -> tuple[Tensor, Tensor]:
    experts, both_wide, inner = gate_up.shape
    count, ffn = weights.shape[0], both_wide // 2
    both, hidden = x.new_empty(count, both_wide), x.new_empty(count, ffn)
    tiles = _listed(ends, count, tile)
    launch(
        _gated,
        (tiles[0].shape[0] * (ffn // (tile.columns // 2)),),
        x,
        x,
        ends if tokens is None else tokens,
        gate_up,
        *tiles,
        weights,
        both,
        hidden,
        experts,
        inner,
        ffn,
        x.stride(0),
        GATHERS=tokens is not None,
        **_settings(x, tile),
    )
    return both, hidden


def gated_gradients(
    dy: Tensor, tokens: Tensor | None, down: Tensor, ends: Tensor, both: Tensor, weights: Tensor, tile: ProductTile
) -> tuple[Tensor, Tensor]:
    experts, inner, ffn = down.shape
    count = both.shape[0]
    dboth = torch.empty_like(both)
    parts = dy.new_empty(ffn // tile.columns, count, dtype=torch.float32)
    tiles = _listed(ends, count, tile)
    launch(
        _gated_gradients,
        (tiles[0].shape[0] * parts.shape[0],),
        dy,
        dy,
        ends if tokens is None else tokens,
        down,
        *tiles,
        weights,
        both,
        dboth,
        parts,
        count,
        experts,
        inner,
        ffn,
        dy.stride(0),
        GATHERS=tokens is not None,
        **_settings(dy, tile),
    )
    return dboth, parts.sum(0)


def times(x: Tensor, matrix: Tensor, ends: Tensor, tile: ProductTile) -> Tensor:
    experts, inner, wide = matrix.shape
    y = x.new_empty(x.shape[0], wide)
    tiles = _listed(ends, x.shape[0], tile)
    launch(
        _times,
        (tiles[0].shape[0] * (wide // tile.columns),),
        x,
        x,
        matrix,
        *tiles,
        y,
        experts,
        inner,
        wide,
        x.stride(0),
        *matrix.stride(),
        **_settings(x, tile),
    )
    return y


def outer(
    left: Tensor,
    left_tokens: Tensor | None,
    right: Tensor,
    right_tokens: Tensor | None,
    ends: Tensor,
    tile: ProductTile,
) -> Tensor:
    high, wide = left.shape[1], right.shape[1]
    y = left.new_empty(ends.shape[0], high, wide)
    launch(
        _outer,
        (ends.shape[0] * (high // tile.rows) * (wide // tile.columns),),
        left,
        left,
        ends if left_tokens is None else left_tokens,
        right,
        ends if right_tokens is None else right_tokens,
        ends,
        y,
        high,
        wide,
        left.stride(0),
        right.stride(0),
        GATHERS_LEFT=left_tokens is not None,
        GATHERS_RIGHT=right_tokens is not None,
        **_settings(left, tile),
    )
    return y


def _listed(ends: Tensor, count: int, tile: ProductTile) -> tuple[Tensor, Tensor, Tensor]:
    """Return the experts of tiles, their first rows, and the row after the last of the expert."""
    most = cdiv(count, tile.rows) + ends.shape[0]
    tile_experts, tile_rows, tile_ends = ends.new_empty(3, most).unbind()
    wide = triton.next_power_of_2(ends.shape[0])
    arguments = (ends, tile_experts, tile_rows, tile_ends, most, ends.shape[0])
    launch(_list_tiles, (cdiv(most, _LISTED),), ends, *arguments, ROWS=tile.rows, LISTED=_LISTED, E=wide, num_warps=4)
    return tile_experts, tile_rows, tile_ends


def _settings(x: Tensor, tile: ProductTile) -> dict[str, Any]:
    return dict(
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        M=tile.rows,
        N=tile.columns,
        K=tile.inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
