"""The computations that kernels and streaming replace: attention with pair bias, products of edges, outer products, gating.

Every block calls them here and nowhere else. Attention is a kernel of :mod:`meshfold.kernels`; the others are plain torch.
What would be larger than inputs and outputs, logits and outer products, is made in parts and again in backward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from meshfold import kernels
from meshfold.folding.memory import KEEP_ALL, MemorySettings, Parts, run_parts, some_lines
from meshfold.kernels import pair_attention, pair_attention_makes_logits


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Attention within rows, with a bias that all rows share: ``b r q h d -> b r q h d``.

    ``softmax_k(q·k / sqrt(d) + bias + key_bias) v``: Algorithms 7, 8, 13 and 14 of AlphaFold 2, Algorithm 24 of AlphaFold 3.
    :func:`meshfold.kernels.pair_attention` says more.

    Args:
        q: queries, ``b r q h d``.
        k: keys, ``b r k h d``.
        v: values, ``b r k h d``.
        bias: the pair bias, ``b h q k``; the same for every row.
        key_bias: ``b r k``: 0 for a key that counts and -inf for one that does not (see :func:`key_bias_of`).
        chunk_bytes: of logits, where the kernel makes them: that of some queries at a time. None: all at once.

    Returns:
        The dtype of ``q``; softmax and sums are in float32 or wider. Backward recomputes the weights.
    """
    b, r, queries, h, _ = q.shape
    line = logit_bytes(q, b * r * h * k.shape[2])
    parts = 1 if chunk_bytes is None else min(-(-queries * line // chunk_bytes), queries)
    if parts <= 1:
        return pair_attention(q, k, v, bias, key_bias)

    def compute(first: int, size: int) -> Tensor:
        some = None if bias is None else bias.narrow(2, first, size)
        return pair_attention(q.narrow(2, first, size), k, v, some, key_bias)

    return run_parts(Parts(queries, parts), compute, 2)


def logit_bytes(x: Tensor, elements: int) -> int:
    """Return the bytes of so many logits in attention on tensors like ``x``: 0 where the kernel makes none."""
    if not pair_attention_makes_logits(x):
        return 0
    wide = max(x.element_size(), 4)
    return elements * (wide if x.element_size() == wide else wide + x.element_size())


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
    x, w = (_as_matrices(t) for t in (x, w))
    return torch.matmul(x, w.transpose(-1, -2)).permute(0, 2, 3, 1)


def _as_matrices(x: Tensor) -> Tensor:
    """Return ``b m k c`` as ``b c m k``, copied unless rows or columns of each matrix lie in a row.

    A batched product copies other operands, in forward and again in backward.
    """
    x = x.permute(0, 3, 1, 2)
    turned = x.transpose(-1, -2)
    return x if turned.is_contiguous() else x.contiguous()


def outer_products(
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | float = 1.0,
    *,
    memory: MemorySettings = KEEP_ALL,
    into: Tensor | None = None,
) -> Tensor:
    """Return ``W(Σ_s a_si ⊗ b_sj) / norm``: ``b s i u, b s j v -> b i j c`` (Algorithm 10 of AlphaFold 2), some i at a time.

    Args:
        a, b: the factors.
        weight: ``c (u v)``.
        bias: ``c``.
        norm: ``b i j 1``, or a number.
        memory: chunks and recomputation.
        into: what the result is added to, in place; without gradients only.
    """

    def compute(first: int, size: int) -> Tensor:
        outer = torch.einsum("bsiu,bsjv->bijuv", some_lines(a, 2, first, size), b).flatten(-2)
        y = functional.linear(outer, weight, bias)
        return y / (norm if isinstance(norm, float) else norm.narrow(1, first, size))

    line = a.shape[0] * b.shape[2] * weight.shape[1]
    parts = Parts.of(memory, a.shape[2], line * 3 * a.element_size())
    least = -(-a.shape[2] // max(MOST_ELEMENTS // max(line, 1), 1))
    if least > parts.count:
        parts = Parts(a.shape[2], least, recompute=True)
    return run_parts(parts, compute, 1, into)


def gate(x: Tensor, logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``x · sigmoid(logits)``, times the mask if given (it has a last dim of 1)."""
    gated = x * torch.sigmoid(logits)
    return gated if mask is None else gated * mask


LEAST_NORMALISED = 1 << 23
"""Elements from which a GPU trains a norm by :func:`meshfold.kernels.layer_norm`.

For few channels of many positions torch's kernel for the gradients of weight and bias takes several times what reading them takes.
Ours takes the host longer, which small tensors wait for.
"""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise the last dim: ``.. c -> .. c``."""
    if x.is_cuda and _is_faster_in_ours(x, weight):
        return kernels.layer_norm(x, weight, bias, eps)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def _is_faster_in_ours(x: Tensor, weight: Tensor) -> bool:
    """Return True if a GPU trains a norm of these faster by our kernel than by torch's."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and weight.requires_grad):
        return False
    return x.numel() >= LEAST_NORMALISED and x.dtype is not torch.float64 and not torch.is_autocast_enabled("cuda")
