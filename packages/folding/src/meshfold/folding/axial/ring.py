"""Attention within rows whose keys several ranks share: keys and values pass round the ring.

Each rank has the queries of its own columns and all of the pair bias that they need. Blocks of keys and values arrive one after
the other. Partial results are merged by their log-sum-exp (Liu et al., "Ring Attention", 2023). Backward sends the blocks round
again, with the sums of their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.folding import functions
from meshfold.kernels import merge_attention_, once_differentiable, pair_attention_backward, pair_attention_forward
from meshfold.mesh import Mesh, Pending, collectives
from meshfold.tensor_parallel import CostEntry


def ring_attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None, mesh: Mesh, axes: tuple[str, ...]
) -> Tensor:
    """Compute :func:`.functions.attend` over the keys of all ranks along ``axes``.

    Args:
        q: this rank's queries, ``b r q h d``.
        k, v: this rank's keys and values, ``b r k h d``.
        bias: for this rank's queries and all keys, ``b h q (g k)``.
        key_bias: for this rank's rows and all keys, ``b r (g k)``.
        mesh, axes: the ring.
    """
    if mesh.size(*axes) == 1:
        return functions.attend(q, k, v, bias, key_bias)
    out: Tensor = _Ring.apply(q, k, v, bias, key_bias, mesh, axes)
    return out


def ring_cost(mesh: Mesh, axes: tuple[str, ...], key_bytes: int, sum_bytes: int) -> list[CostEntry]:
    """Return every collective of forward and backward.

    Args:
        mesh, axes: the ring.
        key_bytes: of this rank's keys; its values have as many.
        sum_bytes: of the sums of their gradients, which are in float32 or wider.
    """
    size, spanned = mesh.size(*axes), mesh.spanned(*axes)

    def shifts(phase: str, operand: str, count: int, block: int) -> list[CostEntry]:
        return [CostEntry(phase, "shift", operand, spanned, size, block)] * count

    if size == 1:
        return []
    return [
        *shifts("forward", "kv", size - 1, 2 * key_bytes),
        *shifts("backward", "kv", size - 1, 2 * key_bytes),
        *shifts("backward", "dkv", size, 2 * sum_bytes),
    ]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        key_bias: Tensor | None,
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> Tensor:
        ctx.ring = mesh, axes
        group, wide = mesh.group(*axes), torch.promote_types(q.dtype, torch.float32)
        b, r, queries, h, d = q.shape
        out = q.new_zeros(b * r, queries, h, d, dtype=wide)
        lse = q.new_full((b * r, h, queries), -torch.inf, dtype=wide)
        coming = Pending(torch.stack((k, v)), None)
        for step in range(group.size):
            both = coming.wait()
            if step + 1 < group.size:
                coming = collectives.shift(both, group, async_op=True)
            bias_part, key_part = _parts(bias, key_bias, _source(mesh, axes, step), k.shape[2])
            part, part_lse = pair_attention_forward(q, both[0], both[1], bias_part, key_part)
            merge_attention_(out, lse, part.reshape(out.shape), part_lse.reshape(lse.shape))
        found = out.view(q.shape).to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, key_bias, found, lse.view(b, r, h, queries))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, bias, key_bias, out, lse = ctx.saved_tensors
        mesh, axes = ctx.ring
        group, wide = mesh.group(*axes), torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=wide)
        dbias = None if bias is None else torch.empty_like(bias)
        coming = Pending(torch.stack((k, v)), None)
        sums = Pending(torch.zeros_like(torch.stack((k, v)), dtype=wide), None)
        for step in range(group.size):
            both = coming.wait()
            if step + 1 < group.size:
                coming = collectives.shift(both, group, async_op=True)
            source = _source(mesh, axes, step)
            bias_part, key_part = _parts(bias, key_bias, source, k.shape[2])
            dq_part, dk, dv, dbias_part = pair_attention_backward(
                dout, q, both[0], both[1], bias_part, key_part, out, lse
            )
            dq += dq_part
            if dbias is not None and dbias_part is not None:
                dbias.narrow(-1, source * k.shape[2], k.shape[2]).copy_(dbias_part)
            total = sums.wait() + torch.stack((dk, dv))
            sums = collectives.shift(total, group, async_op=True)
        dk, dv = sums.wait().to(k.dtype)
        return dq.to(q.dtype), dk, dv, dbias, None, None, None


def _source(mesh: Mesh, axes: tuple[str, ...], step: int) -> int:
    """Return the number of the block of keys that arrives after so many steps."""
    group = mesh.group(*axes)
    return mesh.numbers(*axes)[(group.index - step) % group.size]


def _parts(
    bias: Tensor | None, key_bias: Tensor | None, block: int, length: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases of one block of keys."""
    start = block * length
    return (
        None if bias is None else bias.narrow(-1, start, length),
        None if key_bias is None else key_bias.narrow(-1, start, length),
    )
