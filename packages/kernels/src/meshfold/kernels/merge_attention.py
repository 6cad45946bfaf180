"""The merge of partial attention in ring attention, in one launch.

Attention over a set of keys is its output and, per row, the log-sum-exp of its scores. Over two disjoint sets::

    lse = log(exp(lse_1) + exp(lse_2)),   out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

Source: Rabe and Staats, "Self-attention Does Not Need O(n²) Memory", 2021; Liu et al., "Ring Attention", 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels import dispatch


def merge_attention_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over further keys into ``out`` and ``lse``, in place. A piece: it has no backward.

    Args:
        out: ``b s heads d``, float32 or float64: the parts merged so far; zeros before the first part.
        lse: ``b heads s``, of the same dtype: its log-sum-exp; -inf where no key has been seen.
        part: ``b s heads d``, any floating dtype: attention over other keys.
        part_lse: ``b heads s``: its log-sum-exp.

    All may be views with any strides, such as some of the rows of larger tensors.

    Raises:
        ValueError: if the shapes do not fit, or ``out`` and ``lse`` are too narrow to accumulate in.
    """
    b, s, heads, _ = out.shape
    if part.shape != out.shape or lse.shape != (b, heads, s) or part_lse.shape != lse.shape:
        raise ValueError(
            f"out and part must be [b, s, heads, d], lse and part_lse [b, heads, s], got out {list(out.shape)}, "
            f"lse {list(lse.shape)}, part {list(part.shape)}, part_lse {list(part_lse.shape)}"
        )
    if out.dtype != lse.dtype or out.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"out and lse accumulate in float32 or float64, both in the same, got {out.dtype} and {lse.dtype}"
        )
    dispatch.piece(merge, out, lse, part, part_lse)(out, lse, part, part_lse)


# The reference in plain torch: it defines every result and the signatures of the Triton and numba versions.


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge part ``b s heads d`` with its part_lse ``b heads s`` into out and lse of the same shapes, in place.

    out and lse are float32 or float64, part may be narrower; any strides anywhere.
    """
    part_lse = part_lse.to(lse.dtype)
    highest = torch.maximum(lse, part_lse)
    # If neither side has seen a key, inf - inf would be NaN; such a row stays zero.
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    kept, added = (lse - shift).exp_(), (part_lse - shift).exp_()
    both = kept + added
    scale = both.reciprocal().masked_fill_(both == 0.0, 0.0)
    out.mul_((kept * scale).transpose(1, 2).unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (added * scale).transpose(1, 2).unsqueeze(-1))
    lse.copy_(shift + both.log())
