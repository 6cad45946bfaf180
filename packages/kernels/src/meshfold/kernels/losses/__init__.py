"""Softmax cross entropy: of whole logits, and in pieces for a vocabulary that is split over ranks.

Per row, with z the logits over V words, m their maximum and s = sum(exp(z - m)), so that lse = m + log(s)::

    loss    = (1 - ls) * (lse - z[label]) + ls * (lse - mean(z)) + zl * lse**2
    dlogits = g * (softmax(z) * (1 + 2 * zl * lse) - (1 - ls) * onehot(label) - ls / V)

with ls the label smoothing and zl the weight of the z-loss. Computed in float32 (float64 for float64); dlogits is
rounded once to the dtype of the logits.

**Split vocabulary.** A rank holds the columns ``vocab_start`` onwards, of which the first ``vocab_valid`` are words
and the rest is padding, which takes no part and gets a gradient of zero. One all-reduce MAX, one fused all-reduce
SUM, and no communication in the backward::

    m    = all_reduce_max(local_max(logits, valid))
    sums = all_reduce_sum(sum_exp_and_target(logits, m, labels, start, valid, logit_sum=ls > 0))
    loss = loss_per_row(m, sums, ls, zl, V)
    dlogits = cross_entropy_backward(logits, m, sums[0], labels, start, g, ls, zl, V, valid)

A row to be ignored has g = 0 and any label outside the vocabulary. Sources: Shoeybi et al., "Megatron-LM", 2019,
section 3 (the split loss); Szegedy et al., 2016 (label smoothing); Chowdhery et al., "PaLM", 2022 (z-loss).
"""

from __future__ import annotations

from meshfold.kernels.losses.pieces import (
    cross_entropy_backward,
    local_max,
    loss_per_row,
    sum_exp_and_target,
)
from meshfold.kernels.losses.whole import cross_entropy

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "local_max",
    "loss_per_row",
    "sum_exp_and_target",
]
