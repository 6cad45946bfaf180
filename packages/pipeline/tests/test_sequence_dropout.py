"""Attention that drops weights over a split sequence drops those of one process, and has its gradients; in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.kernels import dropout
from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.testing import ranks
from meshfold.sequence import Mask, WeightDropout, attention, shard_sequence
from meshfold.sequence.tiling import dense

ROWS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 3
DROP = WeightDropout(p=0.4, seed=5, key=7, heads=6, first_row=3, first_head=1)  # a part of a batch, and of the heads

MODES: list[tuple[str, dict[str, int]]] = [
    ("ring", {"seq": 4}),
    ("ulysses", {"seq": 4}),
    ("ring_ulysses", {"ring": 2, "ulysses": 2}),
]
MASKS: list[tuple[int, dict[str, Any]]] = [
    (16, dict(causal=True)),
    (13, dict(causal=True, window=3)),
    (13, dict(causal=False)),
    (14, dict(causal=True, documents=(0, 5, 14))),
    (9, dict(causal=False, window=2)),  # cut into triangles of both kinds
]


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(ROWS, length, heads, WIDTH, dtype=torch.float64, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def in_one_place(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """All weights at once, dropped as a tensor of the whole batch and of all heads is."""
    length = mask.length
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    seen = dense(mask, torch.arange(length), torch.arange(length))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / WIDTH**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    everything = weights.new_ones(3 + ROWS, 6, length, length)
    fates = dropout(everything, DROP.p, DROP.seed, DROP.key)[3:, 1 : 1 + HEADS]
    return torch.einsum("bhij,bjhd->bihd", weights * fates, v)


@pytest.mark.few(2)
@ranks(4)
@pytest.mark.parametrize("mode", range(len(MODES)), ids=[name for name, _ in MODES])
def test_output_and_gradients(mode: int) -> None:
    name, axes = MODES[mode]
    mesh = Mesh(axes)
    for length, options in MASKS:
        *whole, dout = inputs(length)
        leaves = [x.clone().requires_grad_() for x in whole]
        wanted = in_one_place(*leaves, Mask(length=length, **options))
        wanted.backward(dout)
        mine = [shard_sequence(x, mesh, name).requires_grad_() for x in whole]
        found = attention(*mine, mesh=mesh, mode=name, length=length, dropout=DROP, **options)
        found.backward(shard_sequence(dout, mesh, name))
        pairs = [(found, wanted), *((x.grad, leaf.grad) for x, leaf in zip(mine, leaves, strict=True))]
        for value, other in pairs:
            assert value is not None and other is not None
            near = 1e-9 * float(other.detach().abs().max())
            torch.testing.assert_close(
                value, shard_sequence(other.detach(), mesh, name), rtol=0, atol=near, msg=f"{name} {options}"
            )


@ranks(2)
def test_what_is_refused() -> None:
    mesh = Mesh({"seq": 2})
    q, k, v = (shard_sequence(x, mesh) for x in inputs(8)[:3])
    with pytest.raises(LayoutError, match=r"dropout=0\.1: .* WeightDropout"):
        attention(q, k, v, mesh=mesh, dropout=0.1)
    with pytest.raises(LayoutError, match=r"ring_self.* drops no weights"):
        attention(q, k, v, mesh=mesh, mode="ring_self", dropout=DROP)
    with pytest.raises(LayoutError, match=r"p=1\.5"):
        WeightDropout(p=1.5, seed=0, key=0, heads=4)
