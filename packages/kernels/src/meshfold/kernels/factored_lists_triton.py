"""Adafactor and CAME over lists of tensors in Triton: programs take tiles of matrices, and leave parts of sums to be added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import launch
from meshfold.kernels.factored_tiles import TILE_COLUMNS, TILE_ROWS, TILE_WIDTH, Tiles, addresses_of, tiles_of
from meshfold.kernels.tensor_lists_triton import ALIGNED, CODES, NO_COPY, _float32, _store, _sum_tiles, addresses_on

_DEEP = 16  # parts of sums that a program adds up at a time
Tensors = Sequence[Tensor]


@triton.jit
def _tile(owners, begins, sizes, count, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the number of the program's matrix, its size, the tile's place in it, and its rows and columns."""
    program = tl.program_id(0)
    number = tl.load(owners + program)
    rows, columns = tl.load(sizes + number), tl.load(sizes + count + number)
    if EVEN:
        columns = tl.multiple_of(columns, 16)
    wide = tl.cdiv(columns, COLUMNS)
    tile = program - tl.load(begins + number)
    down, along = tile // wide, tile % wide
    return number, rows, columns, down, along, down * ROWS + tl.arange(0, ROWS), along * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _divided(x, table, row, count, number, i, j, rows, columns, mean, floor):
    """Return values divided by the root of the matrix that the means of rows and columns represent."""
    r = tl.load(_float32(table, row, count, number, False) + i, mask=i < rows, other=1.0) / tl.maximum(
        mean, tl.sqrt(floor)
    )
    c = tl.load(_float32(table, row + 1, count, number, False) + j, mask=j < columns, other=1.0)
    return x / tl.sqrt(tl.maximum(r[:, None] * c[None, :], floor))


@triton.jit
def _leave(x, kind, tile, sizes, count, sums):
    """Store a tile's sums of rows and columns.

    tile: as :func:`_tile` returns it.
    sums: where those of rows and of columns begin, and how many parts a kind of each has.
    """
    number, rows, columns, down, along, i, j = tile
    of_rows, of_columns, row_parts, column_parts = sums
    at = of_rows + kind * row_parts + tl.load(sizes + 2 * count + number) + along.to(tl.int64) * rows
    tl.store(at + i, tl.sum(x, 1), mask=i < rows)
    at = of_columns + kind * column_parts + tl.load(sizes + 3 * count + number) + down.to(tl.int64) * columns
    tl.store(at + j, tl.sum(x, 0), mask=j < columns)


@triton.jit(do_not_specialize=["count", "row_parts", "column_parts"])
def _sums(
    table,
    owners,
    begins,
    sizes,
    count,
    means,
    of_rows,
    of_columns,
    squares,
    row_parts,
    column_parts,
    floor,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = _tile(owners, begins, sizes, count, EVEN, ROWS, COLUMNS)
    number, rows, columns, _, _, i, j = tile
    sums = of_rows, of_columns, row_parts, column_parts
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    place = i.to(tl.int64)[:, None] * columns + j[None, :]
    g = tl.load(_float32(table, 0, count, number, EVEN) + place, mask=mask, other=0.0)
    if KIND == 0:
        _leave(g * g, 0, tile, sizes, count, sums)
    else:
        mean = tl.load(means + number)
        u = tl.where(mask, _divided(g, table, 1, count, number, i, j, rows, columns, mean, floor), 0.0)
        tl.store(squares + tl.program_id(0), tl.sum(tl.sum(u * u, 1), 0))
        if KIND == 2:
            m = tl.load(_float32(table, 3, count, number, EVEN) + place, mask=mask, other=0.0)
            d = u - m
            _leave(d * d, 0, tile, sizes, count, sums)
            _leave(d * m, 1, tile, sizes, count, sums)
            _leave(m * m, 2, tile, sizes, count, sums)


@triton.jit(do_not_specialize=["count", "parts", "total"])
def _add_parts(parts_of, found, owners, begins, table, count, parts, total, WIDTH: tl.constexpr, DEEP: tl.constexpr):
    """Add up the parts of sums: programs along the vectors of all matrices, and one row of programs for each kind."""
    program, kind = tl.program_id(0), tl.program_id(1)
    number = tl.load(owners + program)
    length, deep = tl.load(table + number), tl.load(table + count + number)
    at = (program - tl.load(begins + number)) * WIDTH + tl.arange(0, WIDTH)
    source = parts_of + kind * parts + tl.load(table + 2 * count + number)
    sums = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(0, deep, DEEP):
        part = first + tl.arange(0, DEEP)
        mask = (part < deep)[:, None] & (at < length)[None, :]
        sums += tl.sum(tl.load(source + part.to(tl.int64)[:, None] * length + at[None, :], mask=mask, other=0.0), 0)
    tl.store(found + kind * total + tl.load(table + 3 * count + number) + at, sums, mask=at < length)


@triton.jit(do_not_specialize=["count"])
def _apply(
    table,
    owners,
    begins,
    sizes,
    count,
    means,
    residual_means,
    limited,
    rates,
    decays,
    floor,
    beta1,
    rest1,
    MEANS: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    COPY: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    number, rows, columns, _, _, i, j = _tile(owners, begins, sizes, count, EVEN, ROWS, COLUMNS)
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    place = i.to(tl.int64)[:, None] * columns + j[None, :]
    at_p = _float32(table, 0, count, number, EVEN) + place
    p = tl.load(at_p, mask=mask, other=0.0)
    g = tl.load(_float32(table, 1, count, number, EVEN) + place, mask=mask, other=0.0)
    u = _divided(g, table, 2, count, number, i, j, rows, columns, tl.load(means + number), floor)
    u = u * tl.load(limited + number)
    if MEANS:
        at_m = _float32(table, 4, count, number, EVEN) + place
        u = tl.load(at_m, mask=mask, other=0.0) * beta1 + u * rest1
        tl.store(at_m, u, mask=mask)
    if CONFIDENCE:
        u = _divided(u, table, 5, count, number, i, j, rows, columns, tl.load(residual_means + number), 0.0)
    p = p * (1.0 - tl.load(decays + number)) - tl.load(rates + number) * u
    tl.store(at_p, p, mask=mask)
    _store(p, table, 4 + MEANS + 2 * CONFIDENCE, count, number, place, mask, EVEN, COPY)


def _run(kernel: Any, tiles: Tiles, lists: Sequence[tuple[Tensors, int]], *arguments: Any, **settings: Any) -> None:
    """Launch a kernel over all tiles. Each list says what of a matrix its tensors have: 0 rows, 1 columns, 2 all."""
    first = lists[0][0][0]
    elements = [[shape[0] for shape in tiles.shapes], [shape[1] for shape in tiles.shapes]]
    elements.append([rows * columns for rows, columns in tiles.shapes])
    addresses = [
        address
        for tensors, what in lists
        for address in addresses_of(tensors, elements[what], tensors[0].element_size())
    ]
    count = len(tiles.shapes)
    even = all(columns % ALIGNED == 0 for columns in elements[1]) and all(
        address % ALIGNED == 0
        for place, (_, what) in enumerate(lists)
        if what == 2
        for address in addresses[place * count : (place + 1) * count]
    )
    table = addresses_on(first.device, tuple(addresses))
    given = (table, tiles.owners, tiles.begins, tiles.sizes, count)
    launch(
        kernel,
        (tiles.programs,),
        first,
        *given,
        *arguments,
        **settings,
        EVEN=even,
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        num_warps=8,
    )


def _mean_rows(tiles: Tiles, rows: Tensors) -> Tensor:
    """Return the mean of each matrix' means of rows."""
    views = [one for row in rows for one in row.view(-1, row.shape[-1]).unbind()]
    lengths = tiles.sizes[0].to(torch.float32)
    return torch.stack(torch._foreach_norm(views, 1.0)) / lengths  # none is below 0


def _sum(tiles: Tiles, lists: Sequence[tuple[Tensors, int]], means: Tensor | None, floor: float, kind: int) -> Any:
    """Return ``(kinds, sums of rows)``, ``(kinds, sums of columns)`` and the squares of updates of each matrix."""
    first, kinds = lists[0][0][0], (1, 0, 3)[kind]
    row_parts, column_parts = (
        torch.empty(max(kinds, 1), one.parts if kinds else 1, dtype=torch.float32, device=first.device)
        for one in (tiles.rows, tiles.columns)
    )
    squares = torch.empty(tiles.programs if kind else 1, dtype=torch.float32, device=first.device)
    _run(
        _sums,
        tiles,
        lists,
        squares if means is None else means,
        row_parts,
        column_parts,
        squares,
        tiles.rows.parts,
        tiles.columns.parts,
        float(floor),
        KIND=kind,
    )
    found = []
    for vectors, parts in ((tiles.rows, row_parts), (tiles.columns, column_parts)):
        sums = torch.empty(kinds, vectors.total, dtype=torch.float32, device=first.device)
        if kinds:
            arguments = (parts, sums, vectors.owners, vectors.begins, vectors.table, vectors.table.shape[1])
            launch(
                _add_parts,
                (vectors.programs, kinds),
                first,
                *arguments,
                vectors.parts,
                vectors.total,
                WIDTH=TILE_WIDTH,
                DEEP=_DEEP,
            )
        found.append(sums)
    totals = torch.zeros(len(tiles.shapes), dtype=torch.float64, device=first.device)
    if kind:
        count = len(tiles.shapes)
        launch(_sum_tiles, (count, 1), first, squares, tiles.begins, totals, count, tiles.programs, BLOCK=1024)
    return (*found, totals)


def _limits(tiles: Tiles, gradients: Tensors, totals: Tensor, clip_threshold: float) -> Tensor:
    """Return what each tensor's update counts times."""
    sums = torch.zeros(len(gradients), dtype=torch.float64, device=totals.device).index_add_(0, tiles.tensors, totals)
    elements = (tiles.sizes[0] * tiles.sizes[1]).to(torch.float64)
    counts = torch.zeros_like(sums).index_add_(0, tiles.tensors, elements)
    return 1 / ((sums / counts).sqrt() / clip_threshold).clamp(min=1.0)


def _views(sums: Tensor, like: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [one.view(shape) for one, shape in zip(sums.split([math.prod(shape) for shape in like]), like, strict=True)]


def _both(sums: Tensor, column_sums: Tensor, tensors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    rows = _views(sums, [tuple(one.shape[:-1]) for one in tensors])
    return rows, _views(column_sums, [(*one.shape[:-2], one.shape[-1]) for one in tensors])


def _tiles_of(tensors: Tensors) -> Tiles:
    return tiles_of(tuple(tuple(one.shape) for one in tensors), tensors[0].device)


def square_sums(gradients: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    rows, columns, _ = _sum(_tiles_of(gradients), [(gradients, 2)], None, 0.0, 0)
    return _both(rows[0], columns[0], gradients)


def limits(gradients: Tensors, rows: Tensors, columns: Tensors, floor: float, clip_threshold: float) -> Tensor:
    tiles = _tiles_of(gradients)
    lists = [(gradients, 2), (rows, 0), (columns, 1)]
    *_, totals = _sum(tiles, lists, _mean_rows(tiles, rows), floor, 1)
    return _limits(tiles, gradients, totals, clip_threshold)


def distances(
    gradients: Tensors, means: Tensors, rows: Tensors, columns: Tensors, clip_threshold: float
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    tiles = _tiles_of(gradients)
    lists = [(gradients, 2), (rows, 0), (columns, 1), (means, 2)]
    of_rows, of_columns, totals = _sum(tiles, lists, _mean_rows(tiles, rows), 0.0, 2)
    found = _limits(tiles, gradients, totals, clip_threshold)
    # (l·u − m)² of d = u − m is l²·d² − 2·l·(1 − l)·d·m + (1 − l)²·m²: exactly d² where nothing is limited.
    limited = found.to(torch.float32)[tiles.tensors]
    sums = []
    for vectors, kinds in ((tiles.rows, of_rows), (tiles.columns, of_columns)):
        each = torch.repeat_interleave(limited, vectors.table[0], output_size=vectors.total)
        rest = 1 - each
        sums.append((kinds[0] * each * each - 2 * each * rest * kinds[1] + rest * rest * kinds[2]).clamp_(min=0.0))
    return found, *_both(sums[0], sums[1], gradients)


def apply(
    parameters: Tensors,
    gradients: Tensors,
    rows: Tensors,
    columns: Tensors,
    copies: Tensors | None,
    limited: Tensor,
    rates: Tensor,
    decays: Tensor,
    floor: float,
    means: Tensors | None,
    beta1: float,
    confidence: tuple[Tensors, Tensors] | None,
) -> None:
    tiles = _tiles_of(parameters)
    lists: list[tuple[Tensors, int]] = [(parameters, 2), (gradients, 2), (rows, 0), (columns, 1)]
    lists += [] if means is None else [(means, 2)]
    lists += [] if confidence is None else [(confidence[0], 0), (confidence[1], 1)]
    lists += [] if copies is None else [(copies, 2)]
    mean = _mean_rows(tiles, rows)
    residual = mean if confidence is None else _mean_rows(tiles, confidence[0])
    numbers = [one.to(torch.float32)[tiles.tensors] for one in (limited, rates, decays)]
    _run(
        _apply,
        tiles,
        lists,
        mean,
        residual,
        *numbers,
        float(floor),
        float(beta1),
        1.0 - beta1,
        MEANS=means is not None,
        CONFIDENCE=confidence is not None,
        COPY=NO_COPY if copies is None else CODES[copies[0].dtype],
    )
