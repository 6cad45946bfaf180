"""Attention on the heads and sequences a rank holds: local in every mode.

Tokens are split by whole sequences and features by whole heads wherever attention runs, so nothing is communicated.
With fewer key/value heads than ranks (GQA, arXiv 2305.13245) neighbouring ranks hold the same key/value head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.tensor_parallel.layers.dropout import Dropout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    p: float = 0.0,
    dropout: Dropout | None = None,
) -> Tensor:
    """Compute scaled dot-product attention; dropped probabilities are the same under every layout.

    Args:
        q: ``b heads s d``, the local heads.
        k, v: ``b kv_heads t d``; each serves ``heads / kv_heads`` neighbouring query heads.
        mask: added to the scores, or bool (True attends), broadcast to ``b heads s t``.
        causal: a query sees the keys up to its own place, counted from the start as torch does.
        scale: of the scores; ``1/√d`` by default.
        p: probability to drop an attention weight. Above 0 the weights are computed in full.
        dropout: drops them; needed where p is above 0.

    Returns:
        ``b heads s d``.
    """
    groups = q.shape[1] // k.shape[1]
    if p == 0.0 or dropout is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return dropout.drop_weights(attention_weights(q, k, mask=mask, causal=causal, scale=scale), p) @ v


def attention_weights(
    q: Tensor, k: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return the weights of :func:`attention` in full, ``b heads s t``; as many heads of keys as of queries.

    A query that the mask lets see nothing, such as one of padding on the left, has weights of 0, as in torch.
    """
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if mask is None:
        return torch.softmax(scores, -1, dtype=wide).to(q.dtype)
    # The softmax of a row that sees nothing is nan, and so would be every gradient.
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1, dtype=wide)
    return weights.masked_fill(blind, 0.0).to(q.dtype)
