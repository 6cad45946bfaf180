"""The computations that kernels and streaming replace: attention with pair bias, products of edges, outer products, gating.

Every block calls them here and nowhere else. Each is plain torch: it is the definition that a kernel is tested against.
What would be larger than inputs and outputs, logits and outer products, is made in parts and again in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, key_bias: Tensor | None = None) -> Tensor:
    """Attention within rows, with a bias that all rows share: ``b r q h d -> b r q h d``.

    ``softmax_k(q·k / sqrt(d) + bias + key_bias) v``: Algorithms 7, 8, 13 and 14 of AlphaFold 2, Algorithm 24 of AlphaFold 3.

    Args:
        q: queries, ``b r q h d``.
        k: keys, ``b r k h d``.
        v: values, ``b r k h d``.
        bias: the pair bias, ``b h q k``; the same for every row.
        key_bias: ``b r k``: 0 for a key that counts and -inf for one that does not (see :func:`key_bias_of`).

    Returns:
        The dtype of ``q``; softmax and sums are in float32 or wider. Backward recomputes the weights.
    """
    out: Tensor = _Attention.apply(q, k, v, bias, key_bias)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None) -> Tensor:
        out, lse = attend_forward(q, k, v, bias, key_bias)
        ctx.save_for_backward(q, k, v, bias, key_bias, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, bias, key_bias, out, lse = ctx.saved_tensors
        return *attend_backward(dout, q, k, v, bias, key_bias, out, lse), None


def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attend` and the logarithm of the sum of its exponentials, a part of the rows and queries at a time.

    Returns:
        ``out`` as :func:`attend`, zero where no key counts; ``lse``, ``b r h q`` in float32 or wider, -inf there.
    """
    b, r, queries, h, _ = q.shape
    parts = list(_parts(q, k))
    if len(parts) == 1:
        return _attend_forward(q, k, v, bias, key_bias)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(b, r, h, queries, dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, some in parts:
        out[:, rows, some], lse[:, rows, :, some] = _attend_forward(
            q[:, rows, some],
            k[:, rows],
            v[:, rows],
            None if bias is None else bias[:, :, some],
            None if key_bias is None else key_bias[:, rows],
        )
    return out, lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the bias, ``b h q k`` summed over rows; a part of the rows and queries at a time.

    The keys may be a part of those that ``out`` and ``lse`` were computed with: the gradients are then those of this part,
    and dq is its contribution.
    """
    parts = list(_parts(q, k))
    if len(parts) == 1:
        return _attend_backward(dout, q, k, v, bias, key_bias, out, lse)
    wide = lse.dtype
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (k, v))
    dbias = None if bias is None else torch.zeros_like(bias, dtype=wide, memory_format=torch.contiguous_format)
    for rows, some in parts:
        dq[:, rows, some], dk_part, dv_part, dbias_part = _attend_backward(
            dout[:, rows, some],
            q[:, rows, some],
            k[:, rows],
            v[:, rows],
            None if bias is None else bias[:, :, some],
            None if key_bias is None else key_bias[:, rows],
            out[:, rows, some],
            lse[:, rows, :, some],
        )
        dk[:, rows] += dk_part
        dv[:, rows] += dv_part
        if dbias is not None and dbias_part is not None:
            dbias[:, :, some] += dbias_part
    return dq, dk.to(k.dtype), dv.to(v.dtype), None if bias is None or dbias is None else dbias.to(bias.dtype)


MOST_ELEMENTS = 1 << 28
"""Elements of an intermediate that is larger than inputs and outputs, before it is made in parts: 1 GiB in float32."""


def _parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Return (rows, queries) whose logits are at most :data:`MOST_ELEMENTS`, but at least those of one query."""
    b, r, queries, h, _ = q.shape
    line = max(b * h * k.shape[2], 1)
    some = min(queries, max(MOST_ELEMENTS // line, 1))
    rows = min(r, max(MOST_ELEMENTS // (line * max(queries, 1)), 1))
    for row in range(0, max(r, 1), max(rows, 1)):
        for query in range(0, max(queries, 1), max(some, 1)):
            yield slice(row, row + rows), slice(query, query + some)


def _attend_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = _logits(q, k, bias, key_bias)
    largest = logits.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (largest + total.log()).squeeze(-1)
    weights = weights.div_(total.masked_fill(total == 0, 1.0))
    out = torch.matmul(weights.to(v.dtype), v.transpose(-2, -3))
    return out.transpose(-2, -3), lse


def _attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    weights = _logits(q, k, bias, key_bias).sub_(lse.unsqueeze(-1)).exp_()
    wide = weights.dtype
    dout_rows, scale = dout.transpose(-2, -3), 1 / math.sqrt(q.shape[-1])
    dv = torch.matmul(weights.to(dout.dtype).transpose(-1, -2), dout_rows).transpose(-2, -3)
    dweights = torch.matmul(dout_rows, v.permute(0, 1, 3, 4, 2)).to(wide)
    shared = (dout.to(wide) * out.to(wide)).sum(-1).transpose(-1, -2).unsqueeze(-1)  # b r h q 1
    dlogits = weights.mul_(dweights.sub_(shared))
    dbias = None if bias is None else dlogits.sum(1).to(bias.dtype)
    narrow = dlogits.to(q.dtype)
    dq = torch.matmul(narrow, k.transpose(-2, -3)).transpose(-2, -3) * scale
    dk = torch.matmul(narrow.transpose(-1, -2), q.transpose(-2, -3)).transpose(-2, -3) * scale
    return dq, dk, dv, dbias


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, key_bias: Tensor | None) -> Tensor:
    """Return ``b r h q k`` in float32 or wider."""
    logits = torch.matmul((q / math.sqrt(q.shape[-1])).transpose(-2, -3), k.permute(0, 1, 3, 4, 2))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits += bias.unsqueeze(1)
    if key_bias is not None:
        logits += key_bias[:, :, None, None, :]
    return logits


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
