"""Copies in wide elements are the copies that torch makes, to the bit, wherever tensors lie."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshfold.mesh.collectives import wide_copies
from meshfold.mesh.collectives.wide_copies import WIDE, wide_contiguous, wide_reshape

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool)


@pytest.fixture(autouse=True)
def _small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_copies, "LEAST", 0)


def bits(x: Tensor) -> list[int]:
    row = x.reshape(-1).clone(memory_format=torch.contiguous_format)  # a single element may have any stride
    kept: list[int] = row.view(torch.uint8).tolist()
    return kept


@st.composite
def turned(draw: st.DrawFn) -> Tensor:
    """Any bits, NaNs of every kind among them, turned and cut."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    shape[-1] = draw(st.sampled_from([1, 3, 8, 16]))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    most = 2 if dtype is torch.bool else 256
    raw = torch.randint(most, (prod(shape) * dtype.itemsize,), generator=seed, dtype=torch.int16)
    x = raw.to(torch.uint8).view(dtype).view(shape)
    x = x.permute(draw(st.permutations(range(len(shape)))))
    dim = draw(st.integers(0, x.dim() - 1))
    start = draw(st.integers(0, x.shape[dim]))
    return x.narrow(dim, start, draw(st.integers(0, x.shape[dim] - start)))


@given(turned())
def test_the_bits_are_those_of_torch(x: Tensor) -> None:
    assert bits(wide_contiguous(x)) == bits(x) and wide_contiguous(x).is_contiguous()
    assert bits(wide_reshape(x, (x.numel(),))) == bits(x.reshape(x.numel()))


def test_runs_of_features_go_in_wide_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    made = torch.Tensor.contiguous

    def watched(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return made(x)

    monkeypatch.setattr(torch.Tensor, "contiguous", watched)
    x = torch.randn(4, 6, 8).bfloat16()
    assert torch.equal(wide_contiguous(x.movedim(1, 0)), x.transpose(0, 1))
    wide_contiguous(x[..., :4].movedim(1, 0))  # 8 bytes
    wide_contiguous(x.movedim(2, 0))  # features apart
    wide_contiguous(x)
    assert seen == [WIDE, torch.bfloat16, torch.bfloat16, torch.bfloat16]


def test_what_can_be_a_view_is_one() -> None:
    x = torch.randn(3, 4, 8)
    assert wide_reshape(x, (12, 8)).data_ptr() == x.data_ptr()
    assert wide_contiguous(x) is x


def test_what_is_differentiated_is_left_to_torch() -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    wide_contiguous(x.movedim(1, 0)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))


def test_tensors_without_values_are_reshaped_too() -> None:
    x = torch.empty(2, 3, 8, device="meta").movedim(1, 0)
    assert wide_reshape(x, (6, 8)).shape == (6, 8) and wide_contiguous(x).is_contiguous()
