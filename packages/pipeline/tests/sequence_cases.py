"""Attention in every mode against attention on one process: the cases, and the exact answer in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import Mesh
from meshfold.sequence import attention, gather_sequence, shard_sequence


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: tuple[int, ...] | None = None,
    scale: float | None = None,
) -> Tensor:
    """``b s heads d`` -> the same: a softmax over a row of scores, with the mask written out pair by pair."""
    n, times = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(times, dim=2) for x in (k, v))
    document = [sum(i >= edge for edge in documents or (0,)) for i in range(n)]
    seen = torch.tensor(
        [
            [
                document[i] == document[j] and (not causal or j <= i) and (window is None or abs(i - j) < window)
                for j in range(n)
            ]
            for i in range(n)
        ]
    )
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


@functools.lru_cache(maxsize=64)
def problem(
    length: int, heads: int, kv_heads: int, d: int, dv: int, batch: int, masks: tuple[tuple[str, Any], ...]
) -> tuple[Tensor, ...]:
    """q, k, v, the gradient of the output, the output, dQ, dK, dV: all of the whole sequence, in float64."""
    q = seeded(batch, length, heads, d, seed=1)
    k, v = seeded(batch, length, kv_heads, d, seed=2), seeded(batch, length, kv_heads, dv, seed=3)
    towards = seeded(batch, length, heads, dv, seed=4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = exact(*leaves, **dict(masks))
    gradients = torch.autograd.grad(out, leaves, towards)
    return tuple(x.detach() for x in (q, k, v, towards, out, *gradients))


# Largest error allowed, relative to the largest element of what is compared.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 4e-2}
NAMES = ("output", "dQ", "dK", "dV")


def compare(
    mesh: Mesh,
    mode: str,
    *,
    length: int = 24,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 8,
    dv: int = 0,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
    order: str | None = None,
    kernel: str = "auto",
    **masks: Any,
) -> None:
    """Assert that output and gradients on this rank's mesh are those of the whole sequence."""
    whole = problem(length, heads, kv_heads, d, dv or d, batch, tuple(masks.items()))
    shards = [shard_sequence(x, mesh, mode, order=order).to(dtype) for x in whole[:4]]
    leaves = [x.requires_grad_() for x in shards[:3]]
    out = attention(*leaves, mesh=mesh, mode=mode, length=length, order=order, kernel=kernel, **masks)
    assert out.dtype is dtype
    got = (out, *torch.autograd.grad(out, leaves, shards[3]))
    for name, mine, wanted in zip(NAMES, got, whole[4:], strict=True):
        assert mine.dtype is dtype
        joined = gather_sequence(mine.detach().double(), mesh, mode, length=length, order=order)
        error = float((joined - wanted).abs().max() / (wanted.abs().max() or 1.0))
        assert error < TOLERANCE[dtype], f"{name} is off by {error:.2g} under {mode}, {masks}"
