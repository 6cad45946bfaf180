"""RMSNorm and LayerNorm of rows that ranks share, in pieces with a sum over the ranks between them.

Where the hidden dim is split over mesh axes, each rank holds some columns of every row and the
statistics need an all-reduce (sum) or an all-gather in between. ``hidden`` is the global width::

    RMSNorm    square = all_reduce(rms_norm_stats(x));               rstd = rsqrt(square / hidden + eps)
               y = rms_norm_apply(x, weight, rstd)
    backward   sums = all_reduce(rms_norm_backward_stats(dy, x, weight, rstd))
               dx, dweight = rms_norm_backward_apply(dy, x, weight, rstd, sums, hidden)

    LayerNorm  mean, rstd = layer_norm_joined(all_gather(layer_norm_stats(x)), eps)
               y = layer_norm_apply(x, weight, bias, mean, rstd)
    backward   sums = all_reduce(layer_norm_backward_stats(dy, x, weight, mean, rstd))
               dx, dweight, dbias = layer_norm_backward_apply(dy, x, weight, mean, rstd, sums, hidden)

Pieces have no backward of their own: they are made for a torch.autograd.Function. Their weight gradients are sums
over the local rows in float32, so that a sum over ranks still comes before the one rounding.
"""

from __future__ import annotations

from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.inputs import as_rows, check_vector
from meshfold.kernels.norms import gradient_sums, gradients, joined_moments, normalise, row_moments, square_sums


def rms_norm_stats(x: Tensor) -> Tensor:
    """Return the sum of squares of every row's local columns: ``... h -> ...``, float32 (float64 for float64)."""
    run = dispatch.piece(square_sums, x)
    return run(as_rows(x)).reshape(x.shape[:-1])


def rms_norm_apply(x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
    """x * rstd * weight: ``... h, h, ... -> ... h`` in the dtype of ``x``; ``rstd`` is float32 (float64)."""
    check_vector("weight", weight, x.shape[-1])
    run = dispatch.piece(normalise, x, weight, rstd)
    return run(as_rows(x), weight, None, None, rstd.reshape(-1)).reshape(x.shape)


def rms_norm_backward_stats(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
    """Return the sum of dy * weight * x * rstd over every row's local columns: ``... h -> ...``, float32 (float64)."""
    run = dispatch.piece(gradient_sums, x, dy, weight, rstd)
    return run(as_rows(dy), as_rows(x), weight, None, rstd.reshape(-1)).reshape(x.shape[:-1])


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
    run = dispatch.piece(gradients, x, dy, weight, rstd, sums)
    dx, dweight, _ = run(
        as_rows(dy), as_rows(x), weight, None, rstd.reshape(-1), sums.reshape(1, -1), hidden, None, False
    )
    return dx.reshape(x.shape), dweight


def layer_norm_stats(x: Tensor) -> Tensor:
    """Return mean and variance of every row's local columns: ``... h -> 2 ...``, float32 (float64 for float64).

    Not the sums of x and of x**2, which would need no gather: E[x**2] - E[x]**2 loses all its digits if the mean is much larger
    than the deviation.
    """
    run = dispatch.piece(row_moments, x)
    return run(as_rows(x)).reshape(2, *x.shape[:-1])


def layer_norm_joined(stats: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of whole rows: ``g 2 ... -> ..., ...``.

    The variance of a row is the mean of its parts' variances plus the variance of their means (Chan, Golub and LeVeque, 1979).

    Args:
        stats: :func:`layer_norm_stats` of ``g`` parts of the rows, all of the same width.
        eps: added to the variance.
    """
    run = dispatch.piece(joined_moments, stats)
    mean, rstd = run(stats.reshape(stats.shape[0], 2, -1), eps)
    return mean.reshape(stats.shape[2:]), rstd.reshape(stats.shape[2:])


def layer_norm_apply(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean) * rstd * weight + bias: ``... h, h, h, ..., ... -> ... h`` in the dtype of ``x``."""
    check_vector("weight", weight, x.shape[-1])
    check_vector("bias", bias, x.shape[-1])
    run = dispatch.piece(normalise, x, weight, bias, mean, rstd)
    return run(as_rows(x), weight, bias, mean.reshape(-1), rstd.reshape(-1)).reshape(x.shape)


def layer_norm_backward_stats(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return the sums of dy * weight and of dy * weight * (x - mean) * rstd: ``... h -> 2 ...``, for one all-reduce."""
    run = dispatch.piece(gradient_sums, x, dy, weight, mean, rstd)
    sums = run(as_rows(dy), as_rows(x), weight, mean.reshape(-1), rstd.reshape(-1))
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
        with_bias: also return dbias.

    Returns:
        dx in the dtype of ``x``; dweight and dbias [h] over the local rows, float32 (float64), or None.
    """
    run = dispatch.piece(gradients, x, dy, weight, mean, rstd, sums)
    dx, dweight, dbias = run(
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
