"""Norms against torch's own in float64, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold import kernels as K

Check = Callable[..., None]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def seeded(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def exact_rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def exact_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def grads(outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...], seed: int = 9) -> tuple[Tensor, ...]:
    towards = [seeded(*y.shape, dtype=y.dtype, seed=seed + i) for i, y in enumerate(outputs)]
    return torch.autograd.grad(outputs, inputs, towards)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 16), (1, 1), (7, 33), (4,), (0, 8)], ids=str)
def test_rms_norm_and_its_gradients(dtype: torch.dtype, shape: tuple[int, ...], rounded_once: Check) -> None:
    x, w = seeded(*shape, dtype=dtype), seeded(shape[-1], dtype=dtype, seed=1)
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    x.requires_grad_(), w.requires_grad_()
    y, exact = K.rms_norm(x, w, 1e-5), exact_rms(x64, w64, 1e-5)
    rounded_once(y, exact, "y")
    dy = seeded(*shape, dtype=dtype, seed=2)
    got = torch.autograd.grad(y, (x, w), dy)
    wanted = torch.autograd.grad(exact, (x64, w64), dy.double())
    rounded_once(got[0], wanted[0], "dx", slack=4, scale=1.0)
    rounded_once(got[1], wanted[1], "dweight", slack=4, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 16), (7, 33), (4,), (0, 8)], ids=str)
def test_layer_norm_and_its_gradients(dtype: torch.dtype, shape: tuple[int, ...], rounded_once: Check) -> None:
    x = seeded(*shape, dtype=dtype)
    w, b = seeded(shape[-1], dtype=dtype, seed=1), seeded(shape[-1], dtype=dtype, seed=3)
    leaves = tuple(t.requires_grad_() for t in (x, w, b))
    leaves64 = tuple(t.detach().double().requires_grad_() for t in (x, w, b))
    y, exact = K.layer_norm(*leaves, 1e-5), exact_layer(*leaves64, 1e-5)
    rounded_once(y, exact, "y")
    dy = seeded(*shape, dtype=dtype, seed=2)
    got = torch.autograd.grad(y, leaves, dy)
    for name, g, wanted in zip(
        ("dx", "dweight", "dbias"), got, torch.autograd.grad(exact, leaves64, dy.double()), strict=True
    ):
        rounded_once(g, wanted, name, slack=4, scale=1.0)


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm_without_weight_or_bias(with_weight: bool, with_bias: bool) -> None:
    x = seeded(5, 6).requires_grad_()
    w = seeded(6, seed=1).requires_grad_() if with_weight else None
    b = seeded(6, seed=2).requires_grad_() if with_bias else None
    leaves = tuple(t for t in (x, w, b) if t is not None)
    y, exact = K.layer_norm(x, w, b), exact_layer(x, w, b, 1e-5)
    torch.testing.assert_close(y, exact)
    for got, wanted in zip(grads((y,), leaves), grads((exact,), leaves), strict=True):
        torch.testing.assert_close(got, wanted)


def test_mixed_precision_weight_and_gradient_dtypes(rounded_once: Check) -> None:
    x = seeded(6, 10, dtype=torch.bfloat16).requires_grad_()
    w = seeded(10, dtype=torch.float32, seed=1).requires_grad_()
    y = K.rms_norm(x, w)
    assert y.dtype is torch.bfloat16
    rounded_once(y, exact_rms(x.double(), w.double(), 1e-6))
    dx, dw = grads((y,), (x, w))
    assert (dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("stream", [torch.float64, torch.float32, torch.bfloat16])
def test_fused_residual_add_is_the_two_steps(norm: str, stream: torch.dtype) -> None:
    """Values equal bit for bit; gradients, where the fused one rounds once and the two steps twice, to rounding."""
    dtype = torch.bfloat16 if stream is torch.float32 else stream
    x, residual = seeded(2, 4, 12, dtype=dtype), seeded(2, 4, 12, dtype=stream, seed=1)
    w, b = seeded(12, dtype=dtype, seed=2), seeded(12, dtype=dtype, seed=3)
    for t in (x, residual, w, b):
        t.requires_grad_()
    summed = (x.to(torch.promote_types(stream, torch.float32)) + residual).to(stream)
    if norm == "rms":
        leaves: tuple[Tensor, ...] = (x, residual, w)
        fused = K.add_rms_norm(x, residual, w)
        steps = (K.rms_norm(summed, w).to(dtype), summed)
    else:
        leaves = (x, residual, w, b)
        fused = K.add_layer_norm(x, residual, w, b)
        steps = (K.layer_norm(summed, w, b).to(dtype), summed)
    for got, wanted in zip(fused, steps, strict=True):
        assert got.dtype is wanted.dtype and torch.equal(got, wanted)
    tolerance = 1e-12 if stream is torch.float64 else 2e-2
    for got, wanted in zip(grads(fused, leaves), grads(steps, leaves), strict=True):
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_fused_residual_add_with_one_output_unused() -> None:
    x, residual, w = (seeded(3, 8).requires_grad_(), seeded(3, 8, seed=1).requires_grad_(), seeded(8, seed=2))
    y, summed = K.add_rms_norm(x, residual, w)
    alone = torch.autograd.grad(y.sum(), (x, residual))
    torch.testing.assert_close(alone[0], torch.autograd.grad(K.rms_norm(x + residual, w).sum(), x)[0])
    y, summed = K.add_rms_norm(x, residual, w)
    assert torch.equal(torch.autograd.grad(summed.sum(), (x, residual))[0], torch.ones_like(x))


@pytest.mark.parametrize("norm", ["rms", "layer", "add_rms"])
def test_results_may_be_changed_in_place(norm: str) -> None:
    """As behind torch's own norms: ``y = norm(x); y *= 2``."""
    x, w, other = seeded(2, 3, 8).requires_grad_(), seeded(8, seed=1).requires_grad_(), seeded(2, 3, 8, seed=2)

    def made() -> Tensor:
        if norm == "layer":
            return K.layer_norm(x, w, None)
        return K.rms_norm(x, w) if norm == "rms" else K.add_rms_norm(x, other, w)[0]

    y = made()
    y *= 2
    y[:, 0] = y[:, 0] * 3
    wanted = made() * torch.tensor([6.0, 2.0, 2.0], dtype=x.dtype)[:, None]
    for got, expected in zip(grads((y,), (x, w)), grads((wanted,), (x, w)), strict=True):
        torch.testing.assert_close(got, expected)


def test_gradcheck() -> None:
    x, r = seeded(3, 5).requires_grad_(), seeded(3, 5, seed=1).requires_grad_()
    w, b = seeded(5, seed=2).requires_grad_(), seeded(5, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(K.rms_norm, (x, w))
    assert torch.autograd.gradcheck(K.layer_norm, (x, w, b))
    assert torch.autograd.gradcheck(K.add_rms_norm, (x, r, w))
    assert torch.autograd.gradcheck(K.add_layer_norm, (x, r, w, b))


# Pieces: a row cut into parts, with a plain sum where ranks would all-reduce.


def split_rms(x: Tensor, w: Tensor, dy: Tensor, cuts: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden = x.shape[-1]
    xs, ws, dys = x.split(cuts, -1), w.split(cuts), dy.split(cuts, -1)
    square = torch.stack([K.rms_norm_stats(part) for part in xs]).sum(0)
    rstd = torch.rsqrt(square / hidden + eps)
    y = torch.cat([K.rms_norm_apply(a, b, rstd) for a, b in zip(xs, ws, strict=True)], -1)
    parts = list(zip(dys, xs, ws, strict=True))
    sums = torch.stack([K.rms_norm_backward_stats(*part, rstd) for part in parts]).sum(0)
    back = [K.rms_norm_backward_apply(*part, rstd, sums, hidden) for part in parts]
    return y, torch.cat([dx for dx, _ in back], -1), torch.cat([dw for _, dw in back if dw is not None])


def split_layer(
    x: Tensor, w: Tensor, b: Tensor, dy: Tensor, cuts: list[int], eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = x.shape[-1]
    xs, ws, bs, dys = x.split(cuts, -1), w.split(cuts), b.split(cuts), dy.split(cuts, -1)
    mean, rstd = K.layer_norm_joined(torch.stack([K.layer_norm_stats(part) for part in xs]), eps)
    y = torch.cat([K.layer_norm_apply(*part, mean, rstd) for part in zip(xs, ws, bs, strict=True)], -1)
    parts = list(zip(dys, xs, ws, strict=True))
    sums = torch.stack([K.layer_norm_backward_stats(*part, mean, rstd) for part in parts]).sum(0)
    back = [K.layer_norm_backward_apply(*part, mean, rstd, sums, hidden) for part in parts]
    dx, dw, db = (torch.cat([piece for piece in kind if piece is not None], -1) for kind in zip(*back, strict=True))
    return y, dx, dw, db


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_pieces_add_up_to_the_whole(rows: int, cuts: list[int], seed: int) -> None:
    hidden = sum(cuts)
    x, dy = seeded(rows, hidden, seed=seed), seeded(rows, hidden, seed=seed + 1)
    w, b = seeded(hidden, seed=seed + 2), seeded(hidden, seed=seed + 3)
    leaves = tuple(t.clone().requires_grad_() for t in (x, w, b))
    exact = exact_rms(*leaves[:2], 1e-5)
    wanted = (exact, *torch.autograd.grad(exact, leaves[:2], dy))
    for got, value in zip(split_rms(x, w, dy, cuts, 1e-5), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-9)
    if hidden % len(cuts):
        return
    cuts = [hidden // len(cuts)] * len(cuts)  # ranks share rows of LayerNorm evenly
    exact = exact_layer(*leaves, 1e-5)
    wanted = (exact, *torch.autograd.grad(exact, leaves, dy))
    for got, value in zip(split_layer(x, w, b, dy, cuts, 1e-5), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_keep_wide_statistics(dtype: torch.dtype) -> None:
    """Statistics and weight gradients stay float32 (float64), so that a sum over ranks comes before the rounding."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x, w = seeded(2, 3, 8, dtype=dtype), seeded(8, dtype=dtype, seed=1)
    square = K.rms_norm_stats(x)
    assert square.shape == (2, 3) and square.dtype is wide
    torch.testing.assert_close(square.double(), x.double().square().sum(-1), rtol=1e-6, atol=0)
    rstd = torch.rsqrt(square / 8 + 1e-6)
    y = K.rms_norm_apply(x, w, rstd)
    assert y.dtype is dtype and torch.equal(y, K.rms_norm(x, w))
    sums = K.rms_norm_backward_stats(y, x, w, rstd)
    dx, dw = K.rms_norm_backward_apply(y, x, w, rstd, sums, 8)
    assert dw is not None and (sums.dtype, dx.dtype, dw.dtype) == (wide, dtype, wide)


@pytest.mark.parametrize("mean", [0.0, 100.0, 4096.0, 1e6])
@pytest.mark.parametrize("apart", [0.0, 3.0])
def test_joined_moments_are_as_good_as_two_passes(mean: float, apart: float) -> None:
    """Beside a large mean, and where the parts have means of their own: the error of y is that of the best float32 mean."""
    x = seeded(256, 4, 32) + mean + apart * torch.arange(4.0).unsqueeze(1)
    x = x.flatten(1).to(torch.float32)
    found = K.layer_norm_joined(torch.stack([K.layer_norm_stats(part) for part in x.split(32, -1)]), 1e-5)
    centre = x.sum(-1) / 128
    passes = centre, torch.rsqrt((x - centre.unsqueeze(-1)).square().sum(-1) / 128 + 1e-5)
    wanted = K.layer_norm_apply(
        x.double(), None, None, x.double().mean(-1), (x.double().var(-1, correction=0) + 1e-5).rsqrt()
    )
    joined, twice = (
        float((K.layer_norm_apply(x, None, None, *stats).double() - wanted).abs().max()) for stats in (found, passes)
    )
    assert joined <= 1.5 * twice + 1e-6


def test_rows_may_lie_anyhow() -> None:
    """Slices, transposes, expanded rows: the layout in memory changes nothing."""
    base = seeded(6, 10, 8)
    w = seeded(8, seed=1)
    for view in (
        base[:, ::3],
        base.transpose(0, 1),
        base[:, :1].expand(6, 4, 8),
        base.permute(2, 1, 0)[..., :6],
    ):
        weight = w[: view.shape[-1]]
        leaf = view.detach().requires_grad_()
        y = K.rms_norm(leaf, weight)
        dense = view.contiguous().requires_grad_()
        exact = K.rms_norm(dense, weight)
        torch.testing.assert_close(y, exact)
        torch.testing.assert_close(grads((y,), (leaf,))[0], grads((exact,), (dense,))[0])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \[4\].*give it shape \[8\]"):
        K.rms_norm(seeded(2, 8), seeded(4))
    with pytest.raises(ValueError, match="bias has shape"):
        K.layer_norm(seeded(2, 8), seeded(8), seeded(9))
    with pytest.raises(ValueError, match="x and residual must have equal shapes"):
        K.add_rms_norm(seeded(2, 8), seeded(3, 8), None)
    with pytest.raises(TypeError, match="floating-point"):
        K.rms_norm(torch.ones(2, 4, dtype=torch.int64), None)


def test_a_piece_refuses_to_lose_a_gradient() -> None:
    with pytest.raises(K.KernelError, match="these functions have no backward"):
        K.rms_norm_stats(seeded(2, 4).requires_grad_())
    with torch.no_grad():
        K.rms_norm_stats(seeded(2, 4).requires_grad_())
