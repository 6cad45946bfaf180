"""Casts to fp8 (e4m3) with a scale for each row, a power of 2: of a matrix, and of its transpose.

    scale    = 2**floor(log2(448 / amax))           amax: the largest magnitude of a row; at least 1e-30
    values   = round(clamp(x * scale, -448, 448))   to nearest, ties to even; the product is exact
    inverse  = 1 / scale                            nan for a row with nan or infinity, whose values are nan, too

In Triton a cast reads the matrix once, or twice for the transpose, whose rows run across memory, and writes one byte an element.
:func:`cast_both` reads it twice for both. If ranks hold parts of the rows, an amax is taken over them between the two readings
(:func:`cast_turned_over`). The reference makes several passes over memory. All give the same bits.

In compiled code Inductor makes kernels of the reference for casts of rows and fuses what is in front of them. Casts of a transpose,
and of both directions at once, are these kernels there, too, on a GPU with Triton: on one H200 eight blocks of Llama 8B take 219 ms
with them and 231 with Inductor's. ``"reference"`` (:func:`meshfold.kernels.use`) leaves them to Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from meshfold.kernels import dispatch

E4M3_LARGEST = 448.0
LEAST_AMAX = 1e-30  # its scale and the reciprocal are normal float32 numbers
POWER_BITS = 0x7F800000  # exponent of a float32


def power_scale(amax: Tensor, largest: float) -> Tensor:
    """Return the power of 2 that brings an amax next to the largest number of a format, in float32; nan for infinity and nan."""
    # In float64: compiled float32 division is inexact, and the eager and the compiled cast must agree.
    scale = (largest / amax.double().clamp(min=LEAST_AMAX)).float()
    scale = (scale.view(torch.int32) & POWER_BITS).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan)


Cast = tuple[Tensor, Tensor]
"""Values and the inverse of their scales."""


def cast_matrix(x: Tensor) -> Cast:
    """Cast ``r c``, in any layout of memory, with a scale for each row: values ``r c``, row-major, and inverses ``r 1``."""
    if x.stride(1) != 1 and x.stride(0) == 1:
        if _compiles_kernels(x):
            values, inverse = _columns_operation(x.t())
            return values, inverse
        return dispatch.twin(cast_columns, x)(x.t())
    return dispatch.twin(cast_rows, x)(x)


def cast_matrix_both(x: Tensor) -> tuple[Cast, Cast] | None:
    """Cast ``r c`` and its transpose, each with a scale for each of its rows; None where no kernel makes both at once."""
    if x.numel() == 0:
        return None
    if _compiles_kernels(x):
        values, inverse, turned, turned_inverse = _both_operation(x)
        return (values, inverse), (turned, turned_inverse)
    cast = dispatch.twin(cast_both, x)
    return None if cast is cast_both else cast(x)


def cast_turned_over(x: Tensor, maximum: Callable[[Tensor], Tensor], *, both: bool) -> tuple[Cast, Cast] | None:
    """Cast ``r c`` by its own rows, if ``both``, and its transpose by columns that go on on other ranks.

    Args:
        x: of this rank.
        maximum: from the amax of this rank's columns, ``c``, to that of the whole ones.
        both: whether the first cast is made; else it is empty.

    Returns:
        The casts; None where no kernel makes them.
    """
    if x.numel() == 0:
        return None
    if _compiles_kernels(x):
        values, inverse, turned, turned_inverse = _turned_operation(
            x, _columns_over(_amax_operation(x, both), x.shape[1], maximum), both
        )
        return (values, inverse), (turned, turned_inverse)
    measure = dispatch.twin(largest_magnitudes, x)
    if measure is largest_magnitudes:
        return None
    return dispatch.twin(cast_turned, x)(x, _columns_over(measure(x, both), x.shape[1], maximum), both)


def _columns_over(amax: Tensor, columns: int, maximum: Callable[[Tensor], Tensor]) -> Tensor:
    over = maximum(amax[:columns])
    return torch.cat([over, amax[columns:]]) if amax.shape[0] > columns else over


def largest_magnitudes(x: Tensor, both: bool) -> Tensor:
    """Return the amax of each column of ``r c``, and if ``both`` of each row after them: float32, infinity for NaN."""
    size = x.abs().float()
    size = torch.where(size.isfinite(), size, torch.inf)
    return torch.cat([size.amax(0), size.amax(1)]) if both else size.amax(0)


def cast_turned(x: Tensor, amax: Tensor, both: bool) -> tuple[Cast, Cast]:
    """Return :func:`cast_rows`, empty if not ``both``, and :func:`cast_columns` of ``r c`` by a given amax.

    ``amax``: as :func:`largest_magnitudes` returns it.
    """
    columns = x.shape[1]
    return _cast_by(x[: x.shape[0] if both else 0], amax[columns:]), _cast_by(x.t(), amax[:columns])


def cast_rows(x: Tensor) -> Cast:
    """Cast ``r c`` with a scale for each row: values ``r c`` in e4m3, and the inverse of the scales, float32 ``r 1``."""
    return _cast_by(x, x.abs().amax(dim=1).float())


def _cast_by(x: Tensor, amax: Tensor) -> Cast:
    """Cast ``r c`` by the amax of each row, ``r``."""
    scale = power_scale(amax.view(-1, 1), E4M3_LARGEST)
    scaled = (x.float() * scale).clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return scaled.to(torch.float8_e4m3fn).contiguous(), scale.reciprocal()


def cast_columns(x: Tensor) -> Cast:
    """Cast the transpose of ``r c`` with a scale for each of its rows: values ``c r``, row-major, and inverses ``c 1``."""
    return cast_rows(x.t())


def cast_both(x: Tensor) -> tuple[Cast, Cast]:
    """Return :func:`cast_rows` and :func:`cast_columns` of ``r c``."""
    return cast_rows(x), cast_columns(x)


def cast_scaled(x: Tensor, scale: Tensor, out: Tensor, along: Literal["rows", "columns", "none"]) -> None:
    """Cast ``r c``, row-major, with given scales: one for each row or each column, or one for all.

    Args:
        x: floating point.
        scale: float32, ``r``, ``c`` or ``1``.
        out: e4m3, ``r c``, row-major: is written.
        along: the rows or the columns, each with its own scale.
    """
    each = {"rows": scale.view(-1, 1), "columns": scale.view(1, -1), "none": scale}[along]
    out.copy_((x.float() * each).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn))


def turn(values: Tensor, inverse: Tensor) -> Tensor:
    """Return the transpose ``c r`` of 8-bit values ``r c``, row-major. ``inverse``, their scales, chooses the implementation."""
    return values.t().contiguous()


# -- as operations of compiled graphs ---------------------------------------------------------------------------------


def _in_triton() -> bool:
    """Return True if a matrix in bf16 on a GPU is cast in Triton."""
    return dispatch.implementation("fp8_casts", "cuda", torch.bfloat16) == "triton"


# torch.compile treats the result as a constant instead of tracing the choice.
_in_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _compiles_kernels(x: Tensor) -> bool:
    """Return True in code that is being compiled whose casts are to be these kernels."""
    return torch.compiler.is_compiling() and x.is_cuda and x.dtype is torch.bfloat16 and _in_triton()


@torch.library.custom_op("meshfold::fp8_cast_columns", mutates_args=())
def _columns_operation(x: Tensor) -> tuple[Tensor, Tensor]:
    return dispatch.twin(cast_columns, x)(x)


@_columns_operation.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return _empty(x, columns, rows), x.new_empty(columns, 1, dtype=torch.float32)


@torch.library.custom_op("meshfold::fp8_cast_both", mutates_args=())
def _both_operation(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (values, inverse), (turned, turned_inverse) = dispatch.twin(cast_both, x)(x)
    return values, inverse, turned, turned_inverse


@_both_operation.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    row_inverse, column_inverse = (x.new_empty(count, 1, dtype=torch.float32) for count in (rows, columns))
    return _empty(x, rows, columns), row_inverse, _empty(x, columns, rows), column_inverse


@torch.library.custom_op("meshfold::fp8_largest_magnitudes", mutates_args=())
def _amax_operation(x: Tensor, both: bool) -> Tensor:
    return dispatch.twin(largest_magnitudes, x)(x, both)


@_amax_operation.register_fake
def _(x: Tensor, both: bool) -> Tensor:
    rows, columns = x.shape
    return x.new_empty(columns + rows if both else columns, dtype=torch.float32)


@torch.library.custom_op("meshfold::fp8_cast_turned", mutates_args=())
def _turned_operation(x: Tensor, amax: Tensor, both: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (values, inverse), (turned, turned_inverse) = dispatch.twin(cast_turned, x)(x, amax, both)
    return values, inverse, turned, turned_inverse


@_turned_operation.register_fake
def _(x: Tensor, amax: Tensor, both: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    kept = rows if both else 0
    row_inverse, column_inverse = (x.new_empty(count, 1, dtype=torch.float32) for count in (kept, columns))
    return _empty(x, kept, columns), row_inverse, _empty(x, columns, rows), column_inverse


def _empty(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
