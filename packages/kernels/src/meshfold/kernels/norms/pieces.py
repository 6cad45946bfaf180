"""The pieces of norms whose rows are split over ranks: no communication here, and no backward of their own."""

from __future__ import annotations

from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.norms import reference
from meshfold.kernels.norms.interface import NormKernels
from meshfold.kernels.rows import as_rows, check_vector

_reference: NormKernels = reference


def rms_norm_stats(x: Tensor) -> Tensor:
    """Sum of squares of every row's local columns: ``... h -> ...``, float32 (float64 for float64)."""
    kernels = dispatch.piece("norms", _reference, x)
    return kernels.row_sums(as_rows(x), None, True).reshape(x.shape[:-1])


def rms_norm_apply(x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
    """x * rstd * weight: ``... h, h, ... -> ... h`` in the dtype of ``x``; ``rstd`` is float32 (float64)."""
    check_vector("weight", weight, x.shape[-1])
    kernels = dispatch.piece("norms", _reference, x, weight, rstd)
    return kernels.normalise(as_rows(x), weight, None, None, rstd.reshape(-1)).reshape(x.shape)


def rms_norm_backward_stats(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
    """Sum of dy * weight * x * rstd over every row's local columns: ``... h -> ...``, float32 (float64)."""
    kernels = dispatch.piece("norms", _reference, x, dy, weight, rstd)
    return kernels.gradient_sums(as_rows(dy), as_rows(x), weight, None, rstd.reshape(-1)).reshape(
        x.shape[:-1]
    )


def rms_norm_backward_apply(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, sums: Tensor, hidden: int
) -> tuple[Tensor, Tensor | None]:
    """dx and dweight, once the sums are global.

    With n = x * rstd:  dx = rstd * (dy * weight - n * sums / hidden),  dweight = sum over rows of dy * n.

    Args:
        dy, x: ``... h``.
        weight: [h] or None.
        rstd: ``...``, float32 (float64).
        sums: ``...``: :func:`rms_norm_backward_stats`, added up over the ranks that share a row.
        hidden: global width of a row, in elements.

    Returns:
        dx in the dtype of ``x``; dweight [h] over the local rows, float32 (float64), None without a weight.
    """
    kernels = dispatch.piece("norms", _reference, x, dy, weight, rstd, sums)
    dx, dweight, _ = kernels.gradients(
        as_rows(dy), as_rows(x), weight, None, rstd.reshape(-1), sums.reshape(1, -1), hidden, None, False
    )
    return dx.reshape(x.shape), dweight


def layer_norm_sum(x: Tensor) -> Tensor:
    """Sum of every row's local columns: ``... h -> ...``, float32 (float64 for float64)."""
    kernels = dispatch.piece("norms", _reference, x)
    return kernels.row_sums(as_rows(x), None, False).reshape(x.shape[:-1])


def layer_norm_centred_sum(x: Tensor, mean: Tensor) -> Tensor:
    """Sum of (x - mean)**2 over every row's local columns: ``... h, ... -> ...``.

    A second pass, because E[x**2] - E[x]**2 loses all its digits where the mean is large beside the deviation.
    """
    kernels = dispatch.piece("norms", _reference, x, mean)
    return kernels.row_sums(as_rows(x), mean.reshape(-1), True).reshape(x.shape[:-1])


def layer_norm_apply(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    """(x - mean) * rstd * weight + bias: ``... h, h, h, ..., ... -> ... h`` in the dtype of ``x``."""
    check_vector("weight", weight, x.shape[-1])
    check_vector("bias", bias, x.shape[-1])
    kernels = dispatch.piece("norms", _reference, x, weight, bias, mean, rstd)
    return kernels.normalise(as_rows(x), weight, bias, mean.reshape(-1), rstd.reshape(-1)).reshape(x.shape)


def layer_norm_backward_stats(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    """Sums of dy * weight and of dy * weight * (x - mean) * rstd: ``... h -> 2 ...``, for one all-reduce."""
    kernels = dispatch.piece("norms", _reference, x, dy, weight, mean, rstd)
    sums = kernels.gradient_sums(as_rows(dy), as_rows(x), weight, mean.reshape(-1), rstd.reshape(-1))
    return sums.reshape(2, *x.shape[:-1])


def layer_norm_backward_apply(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    sums: Tensor,
    hidden: int,
    with_bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dweight and dbias, once the sums are global.

    With n = (x - mean) * rstd:  dx = rstd * (dy * weight - (sums[0] + n * sums[1]) / hidden),
    dweight = sum over rows of dy * n,  dbias = sum over rows of dy.

    Args:
        dy, x: ``... h``.
        weight: [h] or None.
        mean, rstd: ``...``, float32 (float64).
        sums: ``2 ...``: :func:`layer_norm_backward_stats`, added up over the ranks that share a row.
        hidden: global width of a row, in elements.
        with_bias: whether to find dbias.

    Returns:
        dx in the dtype of ``x``; dweight and dbias [h] over the local rows, float32 (float64), or None.
    """
    kernels = dispatch.piece("norms", _reference, x, dy, weight, mean, rstd, sums)
    dx, dweight, dbias = kernels.gradients(
        as_rows(dy),
        as_rows(x),
        weight,
        mean.reshape(-1),
        rstd.reshape(-1),
        sums.reshape(2, -1),
        hidden,
        None,
        with_bias,
    )
    return dx.reshape(x.shape), dweight, dbias
