"""Rotary embedding against Hugging Face's formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold import kernels as K

Check = Callable[..., None]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def seeded(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin over the first features, the rest as they are; [b, s, heads, d]."""
    r = cos.shape[-1]
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    turning = x[..., :r]
    return torch.cat((turning * cos[:, :, None] + rotate_half(turning) * sin[:, :, None], x[..., r:]), -1)


def tables(s: int, r: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angles = torch.arange(s, dtype=torch.float64)[:, None] * 10.0 ** -torch.linspace(0, 3, r // 2, dtype=torch.float64)
    doubled = torch.cat((angles, angles), -1)
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("r", [8, 4])
def test_apply_rotary_and_its_gradients(dtype: torch.dtype, r: int, rounded_once: Check) -> None:
    q, k = seeded(2, 5, 4, 8, dtype=dtype), seeded(2, 5, 2, 8, dtype=dtype, seed=1)
    cos, sin = tables(5, r, dtype)
    leaves = (q.requires_grad_(), k.requires_grad_())
    leaves64 = tuple(t.detach().double().requires_grad_() for t in leaves)
    got = K.apply_rotary(*leaves, cos, sin)
    wanted = tuple(exact(t, cos.double(), sin.double()) for t in leaves64)
    towards = [seeded(*t.shape, dtype=dtype, seed=2 + i) for i, t in enumerate(got)]
    for g, w in zip(got, wanted, strict=True):
        rounded_once(g, w)
    back = torch.autograd.grad(got, leaves, towards)
    back64 = torch.autograd.grad(wanted, leaves64, [t.double() for t in towards])
    for g, w in zip(back, back64, strict=True):
        rounded_once(g, w)


def test_both_halves_of_the_tables_are_read() -> None:
    """Tables whose halves differ (as no model has) still give the formula and its true gradient."""
    q, k = seeded(1, 3, 2, 6).requires_grad_(), seeded(1, 3, 2, 6, seed=1).requires_grad_()
    cos, sin = seeded(1, 3, 6, seed=2), seeded(1, 3, 6, seed=3)
    torch.testing.assert_close(K.apply_rotary(q, k, cos, sin)[0], exact(q, cos, sin))
    assert torch.autograd.gradcheck(lambda a, b: K.apply_rotary(a, b, cos, sin), (q, k))


@settings(max_examples=25, deadline=None)
@given(
    b=st.integers(1, 3),
    s=st.integers(1, 6),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 5),
    rest=st.integers(0, 3),
)
def test_views_of_a_fused_projection(b: int, s: int, heads: int, kv_heads: int, half: int, rest: int) -> None:
    """q and k as slices of [b, s, (heads + 2 kv_heads) d]."""
    d = 2 * half + rest
    fused = seeded(b, s, heads + 2 * kv_heads, d)
    q, k = fused[:, :, :heads], fused[:, :, heads : heads + kv_heads]
    cos, sin = tables(s, 2 * half)
    wanted = exact(q, cos, sin), exact(k, cos, sin)
    for got, value in zip(K.apply_rotary(q, k, cos, sin), wanted, strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, value)


def test_heads_first_layout_as_a_transposed_view() -> None:
    q, k = seeded(2, 4, 5, 8), seeded(2, 4, 5, 8, seed=1)
    cos, sin = (t.expand(2, 5, 8) for t in tables(5, 8))
    got, _ = K.apply_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    torch.testing.assert_close(got.transpose(1, 2), q * cos[:, None] + rotate_half(q) * sin[:, None])


def test_wrong_shapes_are_refused() -> None:
    q, k = seeded(2, 4, 3, 8), seeded(2, 4, 3, 8)
    cos, sin = tables(4, 8)
    with pytest.raises(ValueError, match=r"q and k must be \[b, s, heads, d\]"):
        K.apply_rotary(q, k[:, :3], cos, sin)
    with pytest.raises(ValueError, match=r"here s = 4, b = 2, d = 8; got \[3, 8\]"):
        K.apply_rotary(q, k, cos[:3], sin[:3])
    with pytest.raises(ValueError, match="r even"):
        K.apply_rotary(q, k, cos[:, :3], sin[:, :3])
