"""RMSNorm and LayerNorm over rows, also with the residual add fused in. For rows that ranks share: :mod:`.split_norms`.

    RMSNorm    y = x * rstd * w,               rstd = 1 / sqrt(mean(x**2) + eps)
    LayerNorm  y = (x - mean) * rstd * w + b,  rstd = 1 / sqrt(mean((x - mean)**2) + eps)

Everything is computed in float32 (float64 for float64) and rounded once, at the output. Sources: Zhang and Sennrich,
"Root Mean Square Layer Normalization", 2019; Ba, Kiros and Hinton, "Layer Normalization", 2016.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.fp8 import Fp8Tensor
from meshfold.kernels.fp8_casts import cast_rows
from meshfold.kernels.fp8_inputs import Fp8Source, offer_input
from meshfold.kernels.functions import applied, once_differentiable
from meshfold.kernels.inputs import as_rows, check_alike, check_vector, compute_dtype, result_of_shape


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, source: Fp8Source | None = None) -> Tensor:
    """RMSNorm of every row: ``... h, h -> ... h``.

    Args:
        x: rows of h elements.
        weight: [h], in any floating dtype, or None.
        eps: added to the mean square.
        source: of results that fp8 products may read: once they do, the same kernel writes their operand.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ValueError: if ``weight`` is not [h].
    """
    check_vector("weight", weight, x.shape[-1])
    if torch.compiler.is_compiling():
        return _plain_rms_norm(x, weight, eps)
    y: Tensor = _norm(x, weight, None, eps, False, source)
    return y


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, *, source: Fp8Source | None = None
) -> Tensor:
    """LayerNorm of every row: ``... h, h, h -> ... h``.

    Args:
        x: rows of h elements.
        weight: [h] or None.
        bias: [h] or None.
        eps: added to the variance.
        source: as of :func:`rms_norm`.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ValueError: if ``weight`` or ``bias`` is not [h].
    """
    check_vector("weight", weight, x.shape[-1])
    check_vector("bias", bias, x.shape[-1])
    if torch.compiler.is_compiling():
        return _plain_layer_norm(x, weight, bias, eps)
    y: Tensor = _norm(x, weight, bias, eps, True, source)
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, *, source: Fp8Source | None = None
) -> tuple[Tensor, Tensor]:
    """Residual add and RMSNorm in one pass: ``... h, ... h, h -> (... h, ... h)``.

    Args:
        x: a block's output, rows of h elements.
        residual: the residual stream, of the same shape; may be wider than ``x`` (float32 with bfloat16).
        weight: [h] or None.
        eps: added to the mean square.
        source: as of :func:`rms_norm`.

    Returns:
        (y, new_residual): new_residual is x + residual, rounded to the residual's dtype; y is the RMSNorm of
        new_residual as rounded, in the dtype of ``x``: the same as the two steps one after the other.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check_alike("x and residual", x, residual)
    check_vector("weight", weight, x.shape[-1])
    if torch.compiler.is_compiling():
        summed = _add(x, residual)
        return _plain_rms_norm(summed, weight, eps, x.dtype), summed
    y, summed = _add_norm(x, residual, weight, None, eps, False, source)
    return y, summed


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    source: Fp8Source | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual add and LayerNorm in one pass; like :func:`add_rms_norm` otherwise."""
    check_alike("x and residual", x, residual)
    check_vector("weight", weight, x.shape[-1])
    check_vector("bias", bias, x.shape[-1])
    if torch.compiler.is_compiling():
        summed = _add(x, residual)
        return _plain_layer_norm(summed, weight, bias, eps, x.dtype), summed
    y, summed = _add_norm(x, residual, weight, bias, eps, True, source)
    return y, summed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        source: Fp8Source | None,
    ) -> Tensor:
        ctx.gradients = dispatch.twin(gradients, x)
        y, _, mean, rstd = _forward(x, None, weight, bias, eps, centred, source)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if x.ndim == 2:
            return y
        # fp8 products that were offered y see by its version whether it has changed, and a view shares that.
        return result_of_shape(y, x.shape) if source is None else y.reshape_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, dweight, dbias = _backward(ctx, dy, None)
        return dx, dweight, dbias, None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        source: Fp8Source | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.gradients = dispatch.twin(gradients, x)
        y, summed, mean, rstd = _forward(x, residual, weight, bias, eps, centred, source)
        if x.ndim != 2:
            y = result_of_shape(y, x.shape) if source is None else y.reshape_as(x)
            summed = result_of_shape(summed, x.shape)
        ctx.save_for_backward(summed, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_dtype = x.dtype
        ctx.set_materialize_grads(False)
        return y, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dsummed: Tensor | None) -> Any:
        if dy is None:
            dx = dsummed
            dweight = dbias = None
        else:
            dx, dweight, dbias = _backward(ctx, dy, dsummed)
        towards_x = dx if dx is None or dx.dtype is ctx.x_dtype else dx.to(ctx.x_dtype)
        return towards_x, dx, dweight, dbias, None, None, None


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    source: Fp8Source | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return :func:`whole` of rows, and offer y to fp8 products, with its cast if they have asked for it."""
    rows, others = as_rows(x), None if residual is None else as_rows(residual)
    if source is None or x.dtype is not torch.bfloat16:
        return dispatch.twin(whole, x)(rows, others, weight, bias, eps, centred)
    if not source.writes:
        found = dispatch.twin(whole, x)(rows, others, weight, bias, eps, centred)
        offer_input(found[0], source)
        return found
    y, summed, mean, rstd, values, inverse = dispatch.twin(whole_and_cast, x)(rows, others, weight, bias, eps, centred)
    offer_input(y, source, Fp8Tensor(values=values, inverse=inverse))
    return y, summed, mean, rstd


def _backward(ctx: Any, dy: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = ctx.gradients(
        as_rows(dy),
        as_rows(x),
        weight,
        mean,
        rstd,
        None,
        x.shape[-1],
        None if added is None else as_rows(added),
        ctx.bias_dtype is not None,
        ctx.bias_dtype if weight is None else weight.dtype,
    )
    if dweight is not None and dweight.dtype is not weight.dtype:
        dweight = dweight.to(weight.dtype)
    if dbias is not None and dbias.dtype is not ctx.bias_dtype:
        dbias = dbias.to(ctx.bias_dtype)
    return dx if x.ndim == 2 else dx.reshape_as(x), dweight, dbias


_norm, _add_norm = applied(_Norm), applied(_AddNorm)


# The reference in plain torch: it defines every result and the signatures of the Triton and numba versions.
# One set of functions serves both norms: RMSNorm is LayerNorm with a mean of zero (``mean=None``). ``m`` contiguous rows of
# ``h`` columns; statistics, sums and weight gradients are float32 (float64 for float64 rows).


def _plain_rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``... h``: x / sqrt(mean(x**2) + eps) * weight, differentiable, in ``dtype`` (that of x)."""
    wide = x.to(compute_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _affine(y, weight, None).to(dtype or x.dtype)


def _plain_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """``... h``: (x - mean) / sqrt(variance + eps) * weight + bias, differentiable, in ``dtype`` (that of x)."""
    wide = x.to(compute_dtype(x))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return _affine(y, weight, bias).to(dtype or x.dtype)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def _centred(x: Tensor, mean: Tensor | None) -> Tensor:
    wide = x.to(compute_dtype(x))
    return wide if mean is None else wide - mean.unsqueeze(-1)


def row_sums(x: Tensor, mean: Tensor | None, square: bool) -> Tensor:
    """``m h -> m``: sum of x, or of (x - mean)**2 when ``square``."""
    centred = _centred(x, mean)
    return torch.linalg.vecdot(centred, centred) if square else centred.sum(-1)


def square_sums(x: Tensor) -> Tensor:
    """``m h -> m``: sum of squares."""
    return row_sums(x, None, True)


def row_moments(x: Tensor) -> Tensor:
    """``m h -> 2 m``: mean and variance."""
    variance, mean = torch.var_mean(x.to(compute_dtype(x)), -1, correction=0)
    return torch.stack((mean, variance))


def joined_moments(found: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``g 2 m -> m, m``: mean and rstd of whole rows, from the moments of equal parts of them."""
    between, mean = torch.var_mean(found[:, 0], 0, correction=0)
    return mean, torch.rsqrt(found[:, 1].mean(0) + between + eps)


def _add(x: Tensor, residual: Tensor) -> Tensor:
    """Return x + residual, rounded once to the dtype of the residual."""
    dtype = compute_dtype(residual)
    return (x.to(dtype) + residual.to(dtype)).to(residual.dtype)


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """``m h, h, h, m, m -> m h``: (x - mean) * rstd * weight + bias."""
    return _affine(_centred(x, mean) * rstd.unsqueeze(-1), weight, bias).to(x.dtype)


def gradient_sums(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """``m h -> 2 m`` (sum of dy*w, sum of dy*w*xhat), or ``1 m`` (the second alone) when ``mean`` is None."""
    normed = _centred(x, mean) * rstd.unsqueeze(-1)
    scaled = _affine(dy.to(normed.dtype), weight, None)
    along = torch.linalg.vecdot(scaled, normed)
    return along.unsqueeze(0) if mean is None else torch.stack((scaled.sum(-1), along))


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
    """Return dx (plus ``added``), dweight and dbias. With ``sums`` None the rows are whole, and their sums are found here.

    The dtype of dx is that of x; dweight is None without a weight, dbias without ``with_bias``. Both are float32 (float64),
    or already rounded to ``dtype``.
    """
    # torch computes no gradient for a bias without a weight.
    as_torch = mean is not None and sums is None and (weight is not None or not with_bias)
    if as_torch and mean is not None and _native(x, dy, weight, mean):
        dx, dweight, dbias = _native_gradients(dy, x, weight, mean, rstd, with_bias)
        return dx if added is None else dx + added, dweight, dbias
    rstd = rstd.unsqueeze(-1)
    normed = _centred(x, mean) * rstd
    wide = dy.to(normed.dtype)
    scaled = _affine(wide, weight, None)
    if sums is None:
        along = torch.linalg.vecdot(scaled, normed)
        sums = along.unsqueeze(0) if mean is None else torch.stack((scaled.sum(-1), along))
    towards = normed * (sums[-1] / hidden).unsqueeze(-1)
    if mean is not None:
        towards = towards + (sums[0] / hidden).unsqueeze(-1)
    dx = (scaled - towards) * rstd
    if added is not None:
        dx = dx + added.to(dx.dtype)
    dweight = None if weight is None else (wide * normed).sum(0)
    return dx.to(x.dtype), dweight, wide.sum(0) if with_bias else None


def whole(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return y in the dtype of x, x + residual (or x), the mean and rstd of whole rows."""
    summed = x if residual is None else _add(x, residual)
    hidden = x.shape[-1]
    if centred and _native(summed, x, weight, bias):
        y, means, rstd = torch.native_layer_norm(summed, (hidden,), weight, bias, eps)
        return y, summed, means.flatten(), rstd.flatten()
    mean = row_sums(summed, None, False) / hidden if centred else None
    rstd = torch.rsqrt(row_sums(summed, mean, True) / hidden + eps)
    y = _affine(_centred(summed, mean) * rstd.unsqueeze(-1), weight, bias)
    return y.to(x.dtype), summed, mean, rstd


def whole_and_cast(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Return :func:`whole`, and y in e4m3 with the inverse of a scale for each row, as :func:`.fp8_casts.cast_rows` makes them."""
    y, summed, mean, rstd = whole(x, residual, weight, bias, eps, centred)
    return y, summed, mean, rstd, *cast_rows(y)


def _native(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if torch's LayerNorm computes the same: all in one precision, with no rounding in between."""
    return x.dtype in (torch.float32, torch.float64) and all(t is None or t.dtype is x.dtype for t in others)


def _native_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, with_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    shape = (*x.shape[:-1], 1)
    wanted = [True, weight is not None, with_bias]
    # torch only checks if there is a bias, so pass the weight.
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, (x.shape[-1],), mean.view(shape), rstd.view(shape), weight, weight, wanted
    )
    return dx, dweight if wanted[1] else None, dbias if with_bias else None
