"""Kernels of a tile, on whatever device is here: parts of the keys merge to all, and shares of gradients add up."""

from __future__ import annotations

import pytest
import torch
from sequence_cases import exact, seeded

from meshfold.sequence import kernels, tile_attention
from meshfold.sequence.tiling import Tile

GPU = torch.cuda.is_available()
on_a_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU: the kernel runs on CUDA alone")
KERNELS = [
    pytest.param("reference", "cpu", torch.float64, id="reference"),
    pytest.param("flash", "cpu", torch.float64, id="flash-cpu"),
    pytest.param("flash", "cpu", torch.bfloat16, id="flash-cpu-bf16"),
    pytest.param("flash", "cuda", torch.bfloat16, id="flash-cuda", marks=on_a_gpu),
    pytest.param("cudnn", "cuda", torch.bfloat16, id="cudnn", marks=on_a_gpu),
    pytest.param("efficient", "cuda", torch.float32, id="efficient", marks=on_a_gpu),
    pytest.param("reference", "cuda", torch.float32, id="reference-cuda", marks=on_a_gpu),
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-3, torch.bfloat16: 3e-2}

# What is computed, as (shape, first query, first key, rows, columns): causal attention of 128 tokens in pieces that
# begin in the middle, and a window of 33 in triangles of both kinds.
CAUSAL = [("lower", 0, 0, 96, 96), ("full", 96, 0, 32, 96), ("lower", 96, 96, 32, 32)]
WINDOW = [
    ("lower", 0, 0, 32, 32),
    *(("upper", 32 * i, 32 * i - 32, 32, 32) for i in (1, 2, 3)),
    *(("lower", 32 * i, 32 * i, 32, 32) for i in (1, 2, 3)),
]


@pytest.mark.parametrize(("name", "device", "dtype"), KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 33])
def test_tiles_make_attention(name: str, device: str, dtype: torch.dtype, kv_heads: int, window: int | None) -> None:
    q = seeded(2, 128, 4, 64, seed=1).requires_grad_()
    k, v = (seeded(2, 128, kv_heads, 64, seed=seed).requires_grad_() for seed in (2, 3))
    towards = seeded(2, 128, 4, 64, seed=4)
    wanted = exact(q, k, v, window=window)
    gradients = torch.autograd.grad(wanted, (q, k, v), towards)
    wanted = wanted.detach()

    on_device = [x.detach().to(device, dtype) for x in (q, k, v, towards)]
    tiles = [Tile(*row) for row in (CAUSAL if window is None else WINDOW)]  # type: ignore[arg-type]
    kernel = kernels.choose(name, *on_device[:3])
    seen = tile_attention.PartialAttention((2, 128, 4, 64), on_device[0])
    met = tile_attention.TilePairs(kernel, *on_device[:3], tiles, 0.125)
    for tile, part, part_lse in met.forward():
        assert part_lse.dtype is kernels.accumulating(dtype)
        seen.take(tile, part, part_lse)
    out, lse = seen.result()
    sums = [torch.zeros(x.shape, dtype=lse.dtype, device=device) for x in on_device[:3]]
    for tile, shares in met.backward(on_device[3], out, lse):
        rows, columns = slice(tile.q, tile.q + tile.rows), slice(tile.k, tile.k + tile.columns)
        for total, share, part in zip(sums, shares, (rows, columns, columns), strict=True):
            total[:, part] += share
    for what, got, right in zip(("output", "dQ", "dK", "dV"), (out, *sums), (wanted, *gradients), strict=True):
        error = float((got.cpu().double() - right).abs().max() / right.abs().max())
        assert error < TOLERANCE[dtype], f"{what} is off by {error:.2g}"


def test_rows_that_see_nothing_are_zero() -> None:
    q, k = seeded(1, 4, 2, 8), seeded(1, 3, 2, 8, seed=1)
    seen = tile_attention.PartialAttention((1, 4, 2, 8), q)
    out, lse = seen.result()
    assert not out.any() and torch.isinf(lse).all()
    met = tile_attention.TilePairs(kernels.REFERENCE, q, k, k, [Tile("full", 1, 0, 2, 3)], 1.0)
    for tile, part, part_lse in met.forward():
        seen.take(tile, part, part_lse)
    out, lse = seen.result()
    assert not out[:, [0, 3]].any() and out[:, 1:3].all()
    assert torch.isinf(lse[..., [0, 3]]).all() and lse[..., 1:3].isfinite().all()
