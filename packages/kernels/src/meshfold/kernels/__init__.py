"""Kernels for CPU and GPU, each beside a torch reference.

Every public function works on any device and floating dtype, computes in float32 (float64 for float64) and rounds once
at the output. :mod:`meshfold.kernels.dispatch` decides whether it runs as plain torch, Triton or numba; :func:`use`
chooses by hand; :func:`available` says what there is. Inside torch.compile every function is traced as plain torch, in
one graph, and fused by Inductor. Importing this package imports torch alone: Triton and numba come with the first
kernel that needs them.
"""

from __future__ import annotations

from meshfold.kernels.activations import bias_gelu, swiglu, swiglu2
from meshfold.kernels.dispatch import Availability, KernelError, available, use
from meshfold.kernels.losses import (
    cross_entropy,
    cross_entropy_backward,
    local_max,
    loss_per_row,
    max_and_sums,
    rescale_sums,
    sum_exp_and_target,
)
from meshfold.kernels.masks import dropout
from meshfold.kernels.norms import (
    add_layer_norm,
    add_layer_norm_sum,
    add_rms_norm,
    add_rms_norm_stats,
    layer_norm,
    layer_norm_apply,
    layer_norm_backward_apply,
    layer_norm_backward_stats,
    layer_norm_centred_sum,
    layer_norm_sum,
    rms_norm,
    rms_norm_apply,
    rms_norm_backward_apply,
    rms_norm_backward_stats,
    rms_norm_stats,
)
from meshfold.kernels.random_bits import random_bits
from meshfold.kernels.rotary import apply_rotary, apply_rotary_

__all__ = [
    "Availability",
    "KernelError",
    "add_layer_norm",
    "add_layer_norm_sum",
    "add_rms_norm",
    "add_rms_norm_stats",
    "apply_rotary",
    "apply_rotary_",
    "available",
    "bias_gelu",
    "cross_entropy",
    "cross_entropy_backward",
    "dropout",
    "layer_norm",
    "layer_norm_apply",
    "layer_norm_backward_apply",
    "layer_norm_backward_stats",
    "layer_norm_centred_sum",
    "layer_norm_sum",
    "local_max",
    "loss_per_row",
    "max_and_sums",
    "random_bits",
    "rescale_sums",
    "rms_norm",
    "rms_norm_apply",
    "rms_norm_backward_apply",
    "rms_norm_backward_stats",
    "rms_norm_stats",
    "sum_exp_and_target",
    "swiglu",
    "swiglu2",
    "use",
]
