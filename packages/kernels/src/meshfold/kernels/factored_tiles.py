"""Maps from programs to tiles of many matrices, and to the sums of their rows and columns: tensors that kernels look up."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 64, 128
"""Size of a tile."""
TILE_WIDTH = 256
"""Sums that a program adds up."""
Tensors = Sequence[Tensor]


class Vectors(NamedTuple):
    """Map from programs to sums, of rows or of columns.

    Attributes:
        owners: the number of each program's matrix, int32.
        begins: the first program of each matrix, int32.
        table: int64, a row each: lengths, parts, where the parts begin, where the sums begin.
        programs: how many there are.
        parts: length of all parts of a kind.
        total: length of all sums of a kind.
    """

    owners: Tensor
    begins: Tensor
    table: Tensor
    programs: int
    parts: int
    total: int


class Tiles(NamedTuple):
    """Map from programs to tiles of matrices.

    Attributes:
        owners: the number of each program's matrix, int32.
        begins: the first program of each matrix and the number of programs, int32.
        sizes: int64, a row each: rows, columns, where parts of the sums of rows begin, and of columns.
        programs: how many there are.
        rows: of the sums of rows.
        columns: of the sums of columns.
        tensors: the number of each matrix' tensor, int64.
        shapes: of each matrix.
    """

    owners: Tensor
    begins: Tensor
    sizes: Tensor
    programs: int
    rows: Vectors
    columns: Vectors
    tensors: Tensor
    shapes: tuple[tuple[int, int], ...]


def _numbered(counts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    begins = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return owners.to(device, torch.int32), begins.to(device, torch.int32)


def _vectors(lengths: Tensor, deep: Tensor, device: torch.device) -> Vectors:
    ends, part_ends = lengths.cumsum(0), (lengths * deep).cumsum(0)
    owners, begins = _numbered(-(-lengths // TILE_WIDTH), device)
    table = torch.stack([lengths, deep, part_ends - lengths * deep, ends - lengths]).to(device)
    return Vectors(owners, begins, table, len(owners), int(part_ends[-1]), int(ends[-1]))


@functools.lru_cache(maxsize=64)
def tiles_of(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Tiles:
    """Return the tiles of matrices; tensors of more than two dims are batches of matrices."""
    matrices, tensors = [], []
    for place, shape in enumerate(shapes):
        batch = math.prod(shape[:-2])
        matrices += [(shape[-2], shape[-1])] * batch
        tensors += [place] * batch
    rows, columns = torch.tensor(matrices).unbind(1)
    down, along = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    of_rows, of_columns = _vectors(rows, along, device), _vectors(columns, down, device)
    owners, begins = _numbered(down * along, device)
    sizes = torch.stack([rows.to(device), columns.to(device), of_rows.table[2], of_columns.table[2]])
    return Tiles(
        owners, begins, sizes, len(owners), of_rows, of_columns, torch.tensor(tensors, device=device), tuple(matrices)
    )


def addresses_of(tensors: Tensors, elements: Sequence[int], size: int) -> list[int]:
    """Return the addresses of each matrix in a list of tensors; ``elements`` of it, each of so many bytes."""
    if len(tensors) == len(elements):  # one matrix a tensor
        return [one.data_ptr() for one in tensors]
    found, place = [], 0
    for one in tensors:
        begin = one.data_ptr()
        end = begin + one.numel() * size
        while begin < end:
            found.append(begin)
            begin += elements[place] * size
            place += 1
    return found
