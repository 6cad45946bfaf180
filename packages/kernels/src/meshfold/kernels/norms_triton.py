"""Norms in Triton: launches of :mod:`.norm_passes_triton`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import norm_passes_triton as passes
from meshfold.kernels import norms as plain
from meshfold.kernels._triton import Prepared, cdiv, launch, programs, remember, tile
from meshfold.kernels.fp8_casts_triton import converts
from meshfold.kernels.inputs import contiguous_like

# Wider rows do not fit a block and go to the reference; no model has them.
_WIDEST = 65536


def square_sums(x: Tensor) -> Tensor:
    if x.shape[1] > _WIDEST:
        return plain.square_sums(x)
    sums = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _over_rows(passes.square_sums, x, sums)
    return sums


def row_moments(x: Tensor) -> Tensor:
    if x.shape[1] > _WIDEST:
        return plain.row_moments(x)
    found = torch.empty((2, x.shape[0]), dtype=torch.float32, device=x.device)
    _over_rows(passes.moments, x, found)
    return found


def _over_rows(kernel: Any, x: Tensor, found: Tensor) -> None:
    rows, hidden = x.shape
    high, wide, warps = tile(hidden)
    sizes = (rows, hidden, x.stride(0))
    launch(kernel, (cdiv(rows, high),), x, x, found, *sizes, ROWS=high, COLUMNS=wide, num_warps=warps)


def joined_moments(found: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    parts, _, rows = found.shape
    mean, rstd = torch.empty((2, rows), dtype=torch.float32, device=found.device).unbind()
    launch(passes.joined_moments, (cdiv(rows, 256),), found, found, mean, rstd, rows, parts, eps, WIDE=256)
    return mean, rstd


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor) -> Tensor:
    if x.shape[1] > _WIDEST:
        return plain.normalise(x, weight, bias, mean, rstd)
    y = contiguous_like(x)
    prepared = _prepare_normalise(x, None, weight, bias, x.stride(0), 0.0, centred=mean is not None, given=True)
    _run_on(prepared, x, None, weight, bias, y, x, mean, rstd)
    return y


_wholes: dict[object, Prepared | None] = {}
_backwards: dict[object, tuple[Prepared, Prepared | None, int] | None] = {}


def whole(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    key = (
        x.shape,
        x.stride(0),
        x.dtype,
        x.get_device(),
        residual if residual is None else (residual.stride(0), residual.dtype),
        weight if weight is None else weight.dtype,
        bias if bias is None else bias.dtype,
        eps,
        centred,
    )
    known: Any = _wholes.get(key, key)
    if known is key:
        known = remember(_wholes, key, _prepared_whole(x, residual, weight, bias, eps, centred))
    if known is None:
        return plain.whole(x, residual, weight, bias, eps, centred)
    y = contiguous_like(x)
    summed = x if residual is None else contiguous_like(residual)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centred else None
    _run_on(known, x, residual, weight, bias, y, summed, mean, rstd)
    return y, summed, mean, rstd


def _prepared_whole(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> Prepared | None:
    """Return the launch of :func:`whole` for such arguments; None where the reference computes it."""
    if x.shape[1] > _WIDEST or (residual is not None and residual.dtype is torch.float64):
        return None
    stride = x.stride(0) if residual is None else x.shape[1]
    return _prepare_normalise(x, residual, weight, bias, stride, eps, centred=centred, given=False)


def whole_and_cast(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    if x.shape[1] > _WIDEST or (residual is not None and residual.dtype is torch.float64):
        return plain.whole_and_cast(x, residual, weight, bias, eps, centred)
    y = contiguous_like(x)
    summed = x if residual is None else contiguous_like(residual)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centred else None
    values = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    inverse = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    prepared = _prepare_normalise(
        x, residual, weight, bias, summed.stride(0), eps, centred=centred, given=False, cast=True
    )
    _run_on(prepared, x, residual, weight, bias, y, summed, mean, rstd, values, inverse)
    return y, summed, mean, rstd, values.view(torch.float8_e4m3fn), inverse


def _prepare_normalise(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    summed_stride: int,
    eps: float,
    *,
    centred: bool,
    given: bool,
    cast: bool = False,
) -> Prepared:
    rows, hidden = x.shape
    other = x if residual is None else residual
    high, wide, warps = tile(hidden)
    return Prepared(
        passes.normalise,
        (cdiv(rows, high),),
        (rows, hidden, eps, x.stride(0), other.stride(0), summed_stride),
        STATS_GIVEN=given,
        CENTRED=centred,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        CAST=cast,
        CONVERTS=converts(x),
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )


def _run_on(
    prepared: Prepared,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    summed: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    values: Tensor | None = None,
    inverse: Tensor | None = None,
) -> None:
    # Unused arguments must still be valid pointers.
    prepared.run(
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        x if bias is None else bias,
        y,
        summed,
        rstd if mean is None else mean,
        rstd,
        rstd if values is None else values,
        rstd if inverse is None else inverse,
    )


def gradient_sums(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor) -> Tensor:
    rows, hidden = x.shape
    if hidden > _WIDEST:
        return plain.gradient_sums(dy, x, weight, mean, rstd)
    sums = torch.empty((1 if mean is None else 2, rows), dtype=torch.float32, device=x.device)
    high, wide, warps = tile(hidden)
    launch(
        passes.gradient_sums,
        (cdiv(rows, high),),
        x,
        dy,
        x,
        x if weight is None else weight,
        rstd if mean is None else mean,
        rstd,
        sums,
        rows,
        hidden,
        dy.stride(0),
        x.stride(0),
        CENTRED=mean is not None,
        HAS_WEIGHT=weight is not None,
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
    return sums


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    sums: Tensor | None,
    hidden: int,
    added: Tensor | None,
    with_bias: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    key = (
        x.shape,
        x.stride(0),
        x.dtype,
        x.get_device(),
        dy.stride(0),
        dy.dtype,
        weight if weight is None else weight.dtype,
        mean is None,
        sums is None,
        hidden,
        added if added is None else (added.stride(0), added.dtype),
        with_bias,
        dtype,
    )
    known: Any = _backwards.get(key, key)
    if known is key:
        made = _prepared_gradients(dy, x, weight, mean, sums, hidden, added, with_bias)
        known = remember(_backwards, key, made)
    if known is None:
        return plain.gradients(dy, x, weight, mean, rstd, sums, hidden, added, with_bias, dtype)
    first, second, count = known
    dx = contiguous_like(x)
    vectors, columns = (weight is not None) + with_bias, x.shape[1]
    parts = torch.empty((vectors, count, columns), dtype=torch.float32, device=x.device) if vectors else rstd
    first.run(
        dy,
        x,
        x if weight is None else weight,
        rstd if mean is None else mean,
        rstd,
        rstd if sums is None else sums,
        x if added is None else added,
        dx,
        parts,
    )
    if second is None:
        return dx, None, None
    found = torch.empty((vectors, columns), dtype=dtype or torch.float32, device=x.device)
    second.run(parts, found)
    dweight, *rest = found.unbind()
    if weight is None:
        return dx, None, dweight
    return dx, dweight, rest[0] if rest else None


def _prepared_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    sums: Tensor | None,
    hidden: int,
    added: Tensor | None,
    with_bias: bool,
) -> tuple[Prepared, Prepared | None, int] | None:
    """Return the launches of :func:`gradients` for such arguments, and the parts of a sum; None where the reference computes it."""
    rows, columns = x.shape
    if columns > _WIDEST or x.dtype is torch.float64:
        return None
    high, wide, warps = tile(columns)
    count = programs(cdiv(rows, high), x)
    vectors = (weight is not None) + with_bias
    first = Prepared(
        passes.gradients,
        (count,),
        (rows, columns, hidden, dy.stride(0), x.stride(0), x.stride(0) if added is None else added.stride(0)),
        SUMS_GIVEN=sums is not None,
        CENTRED=mean is not None,
        HAS_ADDED=added is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=with_bias,
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
    grid = (cdiv(columns, 32), vectors)
    second = Prepared(passes.sum_parts, grid, (count, columns), HIGH=128, WIDE=32, num_warps=8) if vectors else None
    return first, second, count
