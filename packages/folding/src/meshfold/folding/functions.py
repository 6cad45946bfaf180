"""The computations that kernels and streaming replace: attention with pair bias, products of edges, outer products, gating.

Every block calls them here and nowhere else. Attention is a kernel of :mod:`meshfold.kernels`; the others are plain torch.
What would be larger than inputs and outputs, logits and outer products, is made in parts and again in backward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshfold.kernels import pair_attention


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, key_bias: Tensor | None = None) -> Tensor:
    """Attention within rows, with a bias that all rows share: ``b r q h d -> b r q h d``.

    ``softmax_k(q·k / sqrt(d) + bias + key_bias) v``: Algorithms 7, 8, 13 and 14 of AlphaFold 2, Algorithm 24 of AlphaFold 3.
    :func:`meshfold.kernels.pair_attention` says more.

    Args:
        q: queries, ``b r q h d``.
        k: keys, ``b r k h d``.
        v: values, ``b r k h d``.
        bias: the pair bias, ``b h q k``; the same for every row.
        key_bias: ``b r k``: 0 for a key that counts and -inf for one that does not (see :func:`key_bias_of`).

    Returns:
        The dtype of ``q``; softmax and sums are in float32 or wider. Backward recomputes the weights.
    """
    return pair_attention(q, k, v, bias, key_bias)


MOST_ELEMENTS = 1 << 28
"""Elements of an intermediate that is larger than inputs and outputs. A larger one is computed in parts. 1 GiB in float32."""


def key_bias_of(mask: Tensor, dtype: torch.dtype, padding: int = 0) -> Tensor:
    """Turn a mask into the bias of keys: ``.. k -> .. (k + padding)``, 0 for a key that counts and -inf for one that does not.

    A row in which every key is masked attends to all of them, as in AlphaFold, which subtracts the same large number from
    each. Padding never counts.

    Args:
        mask: 1 (True) for a key that counts.
        dtype: of the result.
        padding: keys that are appended.
    """
    counts = mask != 0
    counts = counts | ~counts.any(-1, keepdim=True)
    found = torch.zeros(counts.shape, dtype=dtype, device=mask.device).masked_fill_(~counts, -math.inf)
    return functional.pad(found, (0, padding), value=-math.inf) if padding else found


def multiply_edges(x: Tensor, w: Tensor) -> Tensor:
    """Multiply matrices of edges, channel by channel: ``b m k c, b n k c -> b m n c`` (Algorithms 11 and 12 of AlphaFold 2)."""
    return torch.matmul(x.permute(0, 3, 1, 2), w.permute(0, 3, 2, 1)).permute(0, 2, 3, 1)


def outer_products(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``W(Σ_s a_si ⊗ b_sj)``: ``b s i u, b s j v -> b i j c`` (Algorithm 10 of AlphaFold 2), some i at a time.

    Args:
        a, b: the factors.
        weight: ``c (u v)``.
        bias: ``c``.
    """

    def some(part: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(torch.einsum("bsiu,bsjv->bijuv", part, b).flatten(-2), weight, bias)

    line = a.shape[0] * b.shape[2] * weight.shape[1]
    step = max(MOST_ELEMENTS // max(line, 1), 1)
    if step >= a.shape[2]:
        return some(a, b, weight, bias)
    parts = a.split(step, 2)
    if torch.is_grad_enabled():
        made = [checkpoint(some, part, b, weight, bias, use_reentrant=False) for part in parts]
    else:
        made = [some(part, b, weight, bias) for part in parts]
    return torch.cat(made, 1)


def gate(x: Tensor, logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``x · sigmoid(logits)``, times the mask if given (it has a last dim of 1)."""
    gated = x * torch.sigmoid(logits)
    return gated if mask is None else gated * mask


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise the last dim: ``.. c -> .. c``."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)
