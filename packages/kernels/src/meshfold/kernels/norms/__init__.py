"""RMSNorm and LayerNorm over rows: whole, with the residual add fused in, and in pieces for rows that are split.

    RMSNorm    y = x * rstd * w,               rstd = 1 / sqrt(mean(x**2) + eps)
    LayerNorm  y = (x - mean) * rstd * w + b,  rstd = 1 / sqrt(mean((x - mean)**2) + eps)

Everything is computed in float32 (float64 for float64) and rounded once, at the output. Sources: Zhang and Sennrich,
"Root Mean Square Layer Normalization", 2019; Ba, Kiros and Hinton, "Layer Normalization", 2016.

**Split rows.** Where the hidden dim is split over mesh axes, each rank holds some columns of every row and the
statistics need an all-reduce (sum) in between. ``hidden`` is the global width::

    RMSNorm    square = all_reduce(rms_norm_stats(x));               rstd = rsqrt(square / hidden + eps)
               y = rms_norm_apply(x, weight, rstd)
    backward   sums = all_reduce(rms_norm_backward_stats(dy, x, weight, rstd))
               dx, dweight = rms_norm_backward_apply(dy, x, weight, rstd, sums, hidden)

    LayerNorm  mean = all_reduce(layer_norm_sum(x)) / hidden
               rstd = rsqrt(all_reduce(layer_norm_centred_sum(x, mean)) / hidden + eps)
               y = layer_norm_apply(x, weight, bias, mean, rstd)
    backward   sums = all_reduce(layer_norm_backward_stats(dy, x, weight, mean, rstd))
               dx, dweight, dbias = layer_norm_backward_apply(dy, x, weight, mean, rstd, sums, hidden)

Pieces have no backward of their own: they are made for a torch.autograd.Function. Their weight gradients are sums
over the local rows in float32, so that a sum over ranks still comes before the one rounding.
"""

from __future__ import annotations

from meshfold.kernels.norms.pieces import (
    layer_norm_apply,
    layer_norm_backward_apply,
    layer_norm_backward_stats,
    layer_norm_centred_sum,
    layer_norm_sum,
    rms_norm_apply,
    rms_norm_backward_apply,
    rms_norm_backward_stats,
    rms_norm_stats,
)
from meshfold.kernels.norms.whole import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "layer_norm_apply",
    "layer_norm_backward_apply",
    "layer_norm_backward_stats",
    "layer_norm_centred_sum",
    "layer_norm_sum",
    "rms_norm",
    "rms_norm_apply",
    "rms_norm_backward_apply",
    "rms_norm_backward_stats",
    "rms_norm_stats",
]
