"""Merging partial attention, against attention over all keys at once in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold import kernels as K

Check = Callable[..., None]


def seeded(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def partial(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``b s heads d`` three times -> attention over these keys and its log-sum-exp ``b heads s``; zero keys too."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    lse = scores.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp(), v), lse


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4), dtype=st.sampled_from(["float64", "float32"]))
def test_parts_merge_to_attention_over_all_keys(sizes: list[int], dtype: str) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    q, k, v = (seeded(2, n, 3, 4, seed=i) for i, n in enumerate((5, sum(sizes), sum(sizes))))
    out, lse = torch.zeros(2, 5, 3, 4, dtype=kind), torch.full((2, 3, 5), -torch.inf, dtype=kind)
    for keys, values in zip(k.split(sizes, 1), v.split(sizes, 1), strict=True):
        part, part_lse = partial(q, keys, values)
        K.merge_attention_(out, lse, part.to(kind), part_lse.to(kind))
    exact, exact_lse = partial(q, k, v)
    tolerance = 1e-12 if kind is torch.float64 else 1e-5
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=tolerance, atol=tolerance)


def test_views_of_larger_tensors_and_a_narrow_part() -> None:
    """Some rows of accumulators, in place; the others stay as they are."""
    q, k, v = (seeded(1, n, 2, 8, seed=i) for i, n in enumerate((3, 10, 10)))
    out, lse = torch.zeros(1, 7, 2, 8), torch.full((1, 2, 7), -torch.inf)
    for some in (slice(0, 6), slice(6, 10)):
        part, part_lse = partial(q, k[:, some], v[:, some])
        K.merge_attention_(out[:, 2:5], lse[:, :, 2:5], part.bfloat16(), part_lse.float())
    exact, exact_lse = partial(q, k, v)
    torch.testing.assert_close(out[:, 2:5].double(), exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[:, :, 2:5].double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert not out[:, [0, 1, 5, 6]].any() and torch.isinf(lse[:, :, [0, 1, 5, 6]]).all()


def test_large_scores_do_not_overflow() -> None:
    out, lse = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1), 3e4)
    K.merge_attention_(out, lse, 3 * torch.ones(1, 1, 1, 4), torch.full((1, 1, 1), 3e4))
    assert torch.allclose(out, torch.full_like(out, 2.0))
    assert torch.allclose(lse, torch.full_like(lse, 3e4 + 0.6931), rtol=1e-7)


def test_wrong_shapes_dtypes_and_gradients_are_refused() -> None:
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 2)
    with pytest.raises(ValueError, match="part_lse"):
        K.merge_attention_(out, lse, out, lse.transpose(1, 2))
    with pytest.raises(ValueError, match="accumulate"):
        K.merge_attention_(out.bfloat16(), lse, out, lse)
    with pytest.raises(K.KernelError, match="no backward"):
        K.merge_attention_(out, lse, out.clone().requires_grad_(), lse)
