"""Attention within rows with a bias that all rows share: triangle attention and MSA row attention, never holding all logits.

    out = softmax_k(q·k / sqrt(d) + bias + key_bias) v

Its gradient of the bias is summed over the rows. Softmax and sums are in float32 (float64 for float64). In compiled code a GPU runs
the same kernels, as operations of the graph; Inductor would hold all logits. Sources: Jumper et al.,
"Highly accurate protein structure prediction with AlphaFold", 2021, Algorithms 7, 8, 13 and 14; Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.functions import once_differentiable

MOST_ELEMENTS = 1 << 28
"""Logits of the reference before it goes through rows and queries in parts: 1 GiB in float32."""


def pair_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, key_bias: Tensor | None = None
) -> Tensor:
    """Attend within each row: ``b r q h d -> b r q h d``.

    Backward computes the weights again; memory grows with the inputs, not with the logits ``b r h q k``.

    Args:
        q: queries, ``b r q h d``.
        k: keys, ``b r k h d``.
        v: values, ``b r k h d``.
        bias: the pair bias, ``b h q k``, the same for every row; it may be a permuted view.
        key_bias: ``b r k``, 0 for a key that counts and -inf for one that does not; it has no gradient.

    Returns:
        The dtype of ``q``; zero where no key counts.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    _check(q, k, v, bias, key_bias)
    out: Tensor = _PairAttention.apply(q, k, v, bias, key_bias)
    return out


class _PairAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            ctx.gradients = _gradients_operation if _compiles_kernels(q) else gradients
            out, lse = (_attend_operation if _compiles_kernels(q) else attend)(q, k, v, bias, key_bias)
        else:
            ctx.gradients = dispatch.twin(gradients, q)
            out, lse = pair_attention_forward(q, k, v, bias, key_bias)
        ctx.save_for_backward(q, k, v, bias, key_bias, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, bias, key_bias, out, lse = ctx.saved_tensors
        with_bias = bias is not None and ctx.needs_input_grad[3]
        dq, dk, dv, dbias = ctx.gradients(dout, q, k, v, bias, key_bias, out, lse, with_bias)
        return dq, dk, dv, dbias if with_bias else None, None


def pair_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`pair_attention` and its log-sum-exp. A piece, for keys that are split over ranks: it has no backward.

    Returns:
        ``out``, and ``lse``: ``b r h q`` in float32 or wider, -inf where no key counts.
    """
    return dispatch.piece(attend, q, k, v, bias)(q, k, v, bias, key_bias)


def pair_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    with_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the bias (None without a bias or ``with_bias``). A piece.

    The keys may be a part of those that gave ``out`` and ``lse``. The gradients are then those of this part, and dq is its
    contribution.
    """
    return dispatch.piece(gradients, q, k, v, bias)(
        dout, q, k, v, bias, key_bias, out, lse, with_bias and bias is not None
    )


def pair_attention_makes_logits(x: Tensor) -> bool:
    """Return True if attention on tensors like ``x`` makes logits in memory, as the reference does."""
    return dispatch.twin(attend, x) is attend


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None) -> None:
    if q.ndim != 5 or k.ndim != 5 or k.shape != v.shape or (*k.shape[:2], *k.shape[3:]) != (*q.shape[:2], *q.shape[3:]):
        raise ValueError(
            f"pair_attention takes q [b, r, q, h, d] and k, v [b, r, k, h, d], got {list(q.shape)}, {list(k.shape)} and "
            f"{list(v.shape)}: give them the same batch, rows, heads and head size"
        )
    b, r, queries, h, _ = q.shape
    keys = k.shape[2]
    if bias is not None and bias.shape != (b, h, queries, keys):
        raise ValueError(
            f"the pair bias has shape {list(bias.shape)}, it must be [b, h, q, k] = {[b, h, queries, keys]}"
        )
    if key_bias is not None and key_bias.shape != (b, r, keys):
        raise ValueError(f"key_bias has shape {list(key_bias.shape)}, it must be [b, r, k] = {[b, r, keys]}")


# The reference in plain torch: it defines every result and the signatures of the Triton version.


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse), a part of the rows and queries at a time."""
    b, r, queries, h, _ = q.shape
    parts = list(_parts(q, k))
    if len(parts) == 1:
        return _attend_part(q, k, v, bias, key_bias)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(b, r, h, queries, dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, some in dispatch.parts_to_run(parts, q):
        out[:, rows, some], lse[:, rows, :, some] = _attend_part(
            q[:, rows, some],
            k[:, rows],
            v[:, rows],
            None if bias is None else bias[:, :, some],
            None if key_bias is None else key_bias[:, rows],
        )
    return out, lse


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the bias, a part of the rows and queries at a time."""
    parts = list(_parts(q, k))
    if len(parts) == 1:
        return _gradients_of_part(dout, q, k, v, bias, key_bias, out, lse, with_bias)
    wide = lse.dtype
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (k, v))
    dbias = None
    if with_bias and bias is not None:
        dbias = torch.zeros_like(bias, dtype=wide, memory_format=torch.contiguous_format)
    for rows, some in dispatch.parts_to_run(parts, q):
        dq[:, rows, some], dk_part, dv_part, dbias_part = _gradients_of_part(
            dout[:, rows, some],
            q[:, rows, some],
            k[:, rows],
            v[:, rows],
            None if bias is None else bias[:, :, some],
            None if key_bias is None else key_bias[:, rows],
            out[:, rows, some],
            lse[:, rows, :, some],
            with_bias,
        )
        dk[:, rows] += dk_part
        dv[:, rows] += dv_part
        if dbias is not None and dbias_part is not None:
            dbias[:, :, some] += dbias_part
    return dq, dk.to(k.dtype), dv.to(v.dtype), None if dbias is None or bias is None else dbias.to(bias.dtype)


def _parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Return (rows, queries) whose logits are at most :data:`MOST_ELEMENTS`, but at least those of one query."""
    b, r, queries, h, _ = q.shape
    line = max(b * h * k.shape[2], 1)
    some = min(queries, max(MOST_ELEMENTS // line, 1))
    rows = min(r, max(MOST_ELEMENTS // (line * max(queries, 1)), 1))
    for row in range(0, max(r, 1), max(rows, 1)):
        for query in range(0, max(queries, 1), max(some, 1)):
            yield slice(row, row + rows), slice(query, query + some)


def _attend_part(
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


def _gradients_of_part(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    # Where no key counts every weight is exp(-inf - 0) = 0; with lse itself it would be NaN.
    shift = lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
    weights = _logits(q, k, bias, key_bias).sub_(shift).exp_()
    wide = weights.dtype
    dout_rows, scale = dout.transpose(-2, -3), 1 / math.sqrt(q.shape[-1])
    dv = torch.matmul(weights.to(dout.dtype).transpose(-1, -2), dout_rows).transpose(-2, -3)
    dweights = torch.matmul(dout_rows, v.permute(0, 1, 3, 4, 2)).to(wide)
    shared = (dout.to(wide) * out.to(wide)).sum(-1).transpose(-1, -2).unsqueeze(-1)  # b r h q 1
    dlogits = weights.mul_(dweights.sub_(shared))
    dbias = dlogits.sum(1).to(bias.dtype) if with_bias and bias is not None else None
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


# -- as operations of compiled graphs ---------------------------------------------------------------------------------


def _in_triton() -> bool:
    """Return True if a GPU computes attention in half precision in Triton."""
    return dispatch.implementation("pair_attention", "cuda", torch.bfloat16) == "triton"


# torch.compile treats the result as a constant instead of tracing the choice.
_in_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _compiles_kernels(q: Tensor) -> bool:
    """Return True in code that is being compiled for a GPU that has kernels for these queries."""
    return q.is_cuda and q.dtype != torch.float64 and _in_triton()


@torch.library.custom_op("meshfold::pair_attention", mutates_args=())
def _attend_operation(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = dispatch.twin(attend, q)(q, k, v, bias, key_bias)
    return out.contiguous(), lse.contiguous()


@_attend_operation.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    b, r, queries, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(b, r, h, queries, dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("meshfold::pair_attention_gradients", mutates_args=())
def _gradients_operation(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = dispatch.twin(gradients, q)(dout, q, k, v, bias, key_bias, out, lse, with_bias)
    dq, dk, dv, dbias = (q.new_empty(0) if x is None else x.contiguous() for x in found)
    return dq, dk, dv, dbias


@_gradients_operation.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = q.new_empty(0) if bias is None or not with_bias else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias
