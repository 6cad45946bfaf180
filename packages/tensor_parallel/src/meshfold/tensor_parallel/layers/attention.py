"""Attention on the heads and sequences a rank holds: local in every mode.

Tokens are split by whole sequences and features by whole heads wherever attention runs, so nothing is communicated.
With fewer key/value heads than ranks (GQA, arXiv 2305.13245) neighbouring ranks hold the same key/value head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold import kernels
from meshfold.mesh import Mesh
from meshfold.mesh.dropout_stream import current_dropout_stream
from meshfold.tensor_parallel.modes import Mode


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh,
    mode: Mode,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    name: str = "",
) -> Tensor:
    """Scaled dot-product attention; dropped probabilities are the same under every layout.

    Args:
        q: ``b heads s d``, the local heads.
        k, v: ``b kv_heads t d``; each serves ``heads / kv_heads`` neighbouring query heads.
        mask: added to the scores, or bool (True attends), broadcast to ``b heads s t``.
        causal: a query sees the keys up to its own place, counted from the end.
        scale: of the scores; ``1/√d`` by default.
        dropout: probability to drop an attention weight. Above 0 the weights are computed in full.
        name: of the module, for its own stream of dropout.

    Returns:
        ``b heads s d``.
    """
    groups = q.shape[1] // k.shape[1]
    if dropout == 0.0:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=groups > 1
        )
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    elif causal:
        s, t = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(s, t, dtype=torch.bool, device=q.device).triu(t - s + 1), float("-inf"))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
    return _drop_weights(weights, dropout, mesh, mode, name) @ v


def _drop_weights(weights: Tensor, p: float, mesh: Mesh, mode: Mode, name: str) -> Tensor:
    """Dropout of ``b heads s t``; element (b, head, s, t) of the whole model has one fate, wherever it is."""
    b, heads, s, t = weights.shape
    layout = mode.layout("hidden")
    all_heads = heads * mesh.size(*layout["n"])
    sequence = torch.arange(b, device=weights.device) + mesh.index(*layout["m"]) * b
    head = torch.arange(heads, device=weights.device) + mesh.index(*layout["n"]) * heads
    place = torch.arange(s, device=weights.device)
    rows = ((sequence[:, None, None] * all_heads + head[:, None]) * s + place).reshape(-1)
    stream = current_dropout_stream()
    flat = kernels.dropout(weights.reshape(-1, t), p, stream.seed, stream.next_key(f"{name}.attention"), rows, 0, t, True)
    return flat.view(b, heads, s, t)
