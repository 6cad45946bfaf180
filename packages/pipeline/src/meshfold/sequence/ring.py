"""Ring attention: queries stay, keys and values are passed around the ring.

Forward: at step t a rank attends to the block of the rank t places before it, while it already sends that block to the next
rank. Partial results are merged by their log-sum-exp. Backward: keys and values travel again. Each block brings its dK and dV,
to which every rank adds its share. After a whole round they are back. The whole ring is one autograd function, since only with
the global output and log-sum-exp is a tile's backward exact.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", arXiv 2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import once_differentiable
from meshfold.mesh import Group, collectives
from meshfold.mesh.collectives import Pending, traceable_result
from meshfold.mesh.model_io import kept_attention
from meshfold.sequence import tile_attention
from meshfold.sequence.dropout import DropoutFactors, RingDropout
from meshfold.sequence.kernels import Gradients, Kernel, accumulating
from meshfold.sequence.tiling import Tile


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of keys and values.

    Attributes:
        group: the ring; blocks travel to the next rank of it.
        steps: this rank's tiles at each step.
        kernel: what computes a tile.
        scale: of the scores.
        drop: which weights are dropped; None: none.
    """

    group: Group
    steps: tuple[tuple[Tile, ...], ...]
    kernel: Kernel
    scale: float
    drop: RingDropout | None = None

    def dropout_factors(self, step: int, q: Tensor) -> DropoutFactors | None:
        """Return the dropout factors of a step's tiles; None without dropout."""
        return None if self.drop is None else self.drop.at(step, q)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, job: Round) -> Tensor:
    """Attend over the ring: ``b s heads d, b s kv_heads d, b s kv_heads d -> b s heads d``; differentiable."""
    out: Tensor = _Ring.apply(q, k, v, job)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: Round) -> Tensor:
        if job.drop is None:
            out, lse = kept_attention("ring", lambda: _forward(q, k, v, job), q, k, v)
        else:
            out, lse = _forward(q, k, v, job)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.job = job
        return traceable_result(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return *_backward(dout.contiguous(), q, k, v, out, lse, ctx.job), None


def _forward(q: Tensor, k: Tensor, v: Tensor, job: Round) -> tuple[Tensor, Tensor]:
    seen = tile_attention.PartialAttention((*q.shape[:3], v.shape[3]), q)
    block = _Travelling(job, k, v)
    for step, tiles in enumerate(job.steps):
        k, v = block.arrive(step)
        met = tile_attention.TilePairs(job.kernel, q, k, v, tiles, job.scale, job.dropout_factors(step, q))
        for tile, out, lse in met.forward():
            seen.take(tile, out, lse)
    return seen.result()


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, job: Round) -> Gradients:
    dq = tile_attention.PartialSum(q)
    block = _Travelling(job, k, v)
    sums: Pending | None = None  # dK and dV of the block so far, from the ranks before
    for step, tiles in enumerate(job.steps):
        k, v = block.arrive(step)
        dk, dv = tile_attention.PartialSum(k), tile_attention.PartialSum(v)
        met = tile_attention.TilePairs(job.kernel, q, k, v, tiles, job.scale, job.dropout_factors(step, q))
        for tile, shares in met.backward(dout, out, lse):
            dq.add(tile.q, shares[0])
            dk.add(tile.k, shares[1])
            dv.add(tile.k, shares[2])
        if len(job.steps) > 1:
            total = _total(dk, dv, None if sums is None else sums.wait())  # received while the tiles were computed
            last = step + 1 == len(job.steps)
            hops = job.group.size - step if last else 1  # the last hop returns to the owner
            sums = collectives.shift(total, job.group, hops, async_op=True)
    if sums is None:
        return dq.result(), dk.result(), dv.result()
    dq_done = dq.result()
    dk_sum, dv_sum = _unpacked(sums.wait(), k, v)
    return dq_done, dk_sum.to(k.dtype), dv_sum.to(v.dtype)


def _total(dk: tile_attention.PartialSum, dv: tile_attention.PartialSum, before: Tensor | None) -> Tensor:
    """Add this rank's dK and dV of a block to the sums of the ranks before it, in one wide tensor."""
    wide = accumulating(dk.like.dtype)
    if before is None:
        before = torch.empty(dk.like.numel() + dv.like.numel(), dtype=wide, device=dk.like.device)
        for mine, place in zip((dk, dv), _unpacked(before, dk.like, dv.like), strict=True):
            place.copy_(mine.whole())
        return before
    for mine, place in zip((dk, dv), _unpacked(before, dk.like, dv.like), strict=True):
        mine.onto(place)
    return before


class _Travelling:
    """Keys and values that travel around the ring in one tensor: one message per step, forwarded before it is used."""

    def __init__(self, job: Round, k: Tensor, v: Tensor) -> None:
        self._job, self._k, self._v = job, k, v
        self._packed: Tensor | None = None
        if len(job.steps) > 1:
            self._packed = torch.cat((k.reshape(-1), v.reshape(-1)))
        self._next: Pending | None = None

    def arrive(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this step's block, and start the transfer of the next."""
        if self._packed is None:
            return self._k, self._v
        if self._next is not None:
            self._packed = self._next.wait()
        if step + 1 < len(self._job.steps):
            self._next = collectives.shift(self._packed, self._job.group, async_op=True)
        return _unpacked(self._packed, self._k, self._v)


def _unpacked(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    first, second = packed.split((k.numel(), v.numel()))
    return first.view(k.shape), second.view(v.shape)
