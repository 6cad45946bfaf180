"""Adam on flat shards, in place, in one pass over the memory, for four formats of its state.

The formula, for gradient g, moments m and v, parameter p (Kingma and Ba, arXiv 1412.6980, algorithm 1; decoupled decay:
Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), every operation rounded to float32 and none fused::

    g = grad * grad_scale                            adamw_mode=False:  g = g + weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    p = p * (1 - lr * weight_decay) - (m / (sqrt(v) * correction + eps)) * step_size

with ``step_size = lr / (1 - beta1**step)`` and ``correction = 1 / sqrt(1 - beta2**step)``, all scalars computed in
float64 and rounded once. The reference, numba and Triton give the same bits. A step uses the new moments before they
are rounded for storage.
"""

from __future__ import annotations

from meshfold.kernels.adam.state import AdamState, QuantizedState, SplitState, WholeState
from meshfold.kernels.adam.update import AdamSettings, adam_step, adam_update_moments, adam_update_parameters
from meshfold.kernels.float_bits import join_master, split_master

__all__ = [
    "AdamSettings",
    "AdamState",
    "QuantizedState",
    "SplitState",
    "WholeState",
    "adam_step",
    "adam_update_moments",
    "adam_update_parameters",
    "join_master",
    "split_master",
]
