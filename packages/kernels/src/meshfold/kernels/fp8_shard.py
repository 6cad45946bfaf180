"""A run of a weight's elements, cast to fp8 with the scales of the whole weight: what one of several ranks sends of it.

A weight ``n k`` is flat, row by row, and ranks share its elements. A rank's run may begin and end inside a row. Each rank takes the
amax of each row and column (or of all) of its run. The maximum over the ranks gives the weight's scales. Runs that are cast with
them equal parts of :func:`meshfold.kernels.fp8.fp8_cast_weight` of the whole, bit for bit.

=========== ========================== ==================================
recipe      for y = x wᵀ               for dx = dy w
=========== ========================== ==================================
of rows     a scale for each row       a scale for each column
of tensors  one scale                  the same values and scale
=========== ========================== ==================================

Both are kept as ``n k``: the product for dx turns its values (:func:`meshfold.kernels.fp8_casts.turn`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.fp8 import Fp8Recipe, fp8_scale
from meshfold.kernels.fp8_casts import E4M3_LARGEST, cast_scaled


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """Part of a run that is a matrix.

    Attributes:
        row, column: of its first element in the weight.
        rows, columns: its sizes.
        at: index of its first element in the run.
    """

    row: int
    column: int
    rows: int
    columns: int
    at: int


def rectangles(start: int, length: int, width: int) -> tuple[Rectangle, ...]:
    """Cut the elements ``[start, start + length)`` of a matrix with rows of ``width`` into at most three matrices."""
    found: list[Rectangle] = []
    at = 0
    while at < length:
        row, column = divmod(start + at, width)
        left = length - at
        rows, columns = (left // width, width) if column == 0 and left >= width else (1, min(width - column, left))
        found.append(Rectangle(row=row, column=column, rows=rows, columns=columns, at=at))
        at += rows * columns
    return tuple(found)


class Fp8Shard:
    """A run of a weight's elements.

    Attributes:
        shape: ``n k`` of the weight.
        scales: number of the weight's scales: n + k, or 1.
    """

    def __init__(self, recipe: Fp8Recipe, shape: tuple[int, int], start: int, length: int) -> None:
        """Args:
        recipe: without tiles.
        shape: of the whole weight, ``n k``.
        start: index of the run's first element in the weight.
        length: number of its elements; may be 0.
        """
        self.shape, self._rows = shape, recipe.rows
        self._rectangles = rectangles(start, length, shape[1])
        self.scales = sum(shape) if recipe.rows else 1

    def add_amax(self, values: Tensor, amax: Tensor) -> None:
        """Raise the amax of the weight's rows and columns, or of all, to the run's.

        Args:
            values: the run, flat.
            amax: float32, ``scales``: of rows, then of columns.
        """
        for one in self._rectangles:
            part = self._part(values, one)
            if not self._rows:
                amax.copy_(torch.maximum(amax, torch.linalg.vector_norm(part, math.inf).float()))
                continue
            for dim, first, count in ((1, one.row, one.rows), (0, self.shape[0] + one.column, one.columns)):
                mine = amax[first : first + count]
                mine.copy_(torch.maximum(mine, torch.linalg.vector_norm(part, math.inf, dim).float()))

    def cast(self, values: Tensor, scale: Tensor, out: Tensor, *, columns: bool) -> None:
        """Cast the run with scales of the weight.

        Args:
            values: the run, flat.
            scale: float32, ``scales``, from :func:`weight_scales`.
            out: e4m3, with the length of ``values``: is written.
            columns: with the scale of each column, for dx; else of each row, for y.
        """
        for one in self._rectangles:
            part, to = self._part(values, one), self._part(out, one)
            if not self._rows:
                dispatch.twin(cast_scaled, part)(part, scale, to, "none")
            elif columns:
                first = self.shape[0] + one.column
                dispatch.twin(cast_scaled, part)(part, scale[first : first + one.columns], to, "columns")
            else:
                dispatch.twin(cast_scaled, part)(part, scale[one.row : one.row + one.rows], to, "rows")

    @staticmethod
    def _part(values: Tensor, one: Rectangle) -> Tensor:
        return values[one.at : one.at + one.rows * one.columns].view(one.rows, one.columns)


def weight_scales(amax: Tensor, recipe: Fp8Recipe) -> Tensor:
    """Return the scales of weights of their amax, which is infinity where a value is not finite: there they are nan."""
    return fp8_scale(amax, E4M3_LARGEST, rows=recipe.rows)
