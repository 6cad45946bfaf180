"""Ring self-attention as in its paper: the baseline of arXiv 2105.13120, not a mode to train with.

Keys travel round the ring once to make every score of this rank's queries, then the softmax is taken over whole rows, then values
travel. Backward: both travel again, dK and dV of the whole sequence are summed by all-reduce, and each rank keeps its own part. A
rank holds ``heads · s · length`` scores, masked ones too. For a ring of N ranks and n = elements of a rank's keys, a rank sends 2
(N - 1) n elements forward and 6 (N - 1) n backward, the sum in table 1 of the paper. The all-reduce is in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import once_differentiable
from meshfold.mesh import Group, collectives
from meshfold.mesh.collectives import traceable_result
from meshfold.sequence.kernels import Gradients, accumulating
from meshfold.sequence.sharding import SequenceSharding
from meshfold.sequence.tiling import Mask, dense


@dataclass(frozen=True, kw_only=True)
class RingSelfSettings:
    """Settings of one call: the ring, the sequence's sharding, the mask, the scale of the scores."""

    group: Group
    sharding: SequenceSharding
    mask: Mask
    scale: float


def ring_self_attention(q: Tensor, k: Tensor, v: Tensor, job: RingSelfSettings) -> Tensor:
    """Attend over the ring: ``b s heads d, b s kv_heads d, b s kv_heads d -> b s heads d``; differentiable."""
    out: Tensor = _RingSelf.apply(q, k, v, job)
    return out


class _RingSelf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: RingSelfSettings) -> Tensor:
        wide = accumulating(q.dtype)
        grouped = q.to(wide).unflatten(2, (k.shape[2], -1))
        blocks: list[Tensor] = [q] * job.group.size
        for source, block in _round(k, job.group):
            blocks[source] = torch.einsum("bigrd,bjgd->bgrij", grouped, block.to(wide))
        scores = torch.cat(blocks, -1).mul_(job.scale).masked_fill_(~_seen(job, q.device), -torch.inf)
        highest = scores.amax(-1, keepdim=True).nan_to_num_(neginf=0.0)
        weights = scores.sub_(highest).exp_()
        weights.div_(weights.sum(-1, keepdim=True).clamp_(min=torch.finfo(wide).tiny))
        out = torch.zeros((*grouped.shape[:-1], v.shape[-1]), dtype=wide, device=q.device)
        for source, block in _round(v, job.group):
            out += torch.einsum("bgrij,bjgd->bigrd", _of(weights, source, block), block.to(wide))
        ctx.save_for_backward(q, k, v, weights)
        ctx.job = job
        return traceable_result(out.flatten(2, 3).to(q.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, weights = ctx.saved_tensors
        return *_backward(dout, q, k, v, weights, ctx.job), None


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, job: RingSelfSettings) -> Gradients:
    wide = accumulating(q.dtype)
    groups = (k.shape[2], -1)
    grouped = dout.to(wide).unflatten(2, groups)
    dweights = torch.empty_like(weights)
    for source, block in _round(v, job.group):
        _of(dweights, source, block).copy_(torch.einsum("bigrd,bjgd->bgrij", grouped, block.to(wide)))
    dv = collectives.all_reduce(torch.einsum("bgrij,bigrd->bjgd", weights, grouped), job.group)
    dscores = dweights.sub_((dweights * weights).sum(-1, keepdim=True)).mul_(weights).mul_(job.scale)
    dq = torch.zeros((*grouped.shape[:-1], k.shape[-1]), dtype=wide, device=q.device)
    for source, block in _round(k, job.group):
        dq += torch.einsum("bgrij,bjgd->bigrd", _of(dscores, source, block), block.to(wide))
    dk = collectives.all_reduce(torch.einsum("bgrij,bigrd->bjgd", dscores, q.to(wide).unflatten(2, groups)), job.group)
    mine = slice(job.group.index * k.shape[1], (job.group.index + 1) * k.shape[1])
    return dq.flatten(2, 3).to(q.dtype), dk[:, mine].to(k.dtype), dv[:, mine].to(v.dtype)


def _round(x: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield every rank's block with its index in the ring, this rank's first."""
    for step in range(group.size):
        if step:
            x = collectives.shift(x, group)
        yield (group.index - step) % group.size, x


def _of(scores: Tensor, source: int, block: Tensor) -> Tensor:
    """Return the columns of one rank's keys."""
    return scores.narrow(-1, source * block.shape[1], block.shape[1])


def _seen(job: RingSelfSettings, device: torch.device) -> Tensor:
    sharding = job.sharding
    queries = sharding.indices(job.group.index)
    keys = torch.cat([sharding.indices(rank) for rank in range(sharding.ring)])
    return dense(job.mask, queries, keys).to(device, non_blocking=True)
