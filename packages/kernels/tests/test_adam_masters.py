"""The split master weight: every interesting bit pattern, and random ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold import kernels as K

IMPLEMENTATIONS = ("reference", "numba")


def floats(bits: Tensor) -> Tensor:
    """float32 numbers with the given bits, an int64 tensor."""
    return bits.to(torch.int32).view(torch.float32)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def check(x: Tensor) -> None:
    hi, lo = K.split_master(x)
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16)
    back, nan = K.join_master(hi, lo), x.isnan()
    assert torch.equal(bits(back)[~nan], bits(x)[~nan])
    assert torch.equal(back.isnan(), nan) and torch.equal(hi.isnan(), nan)
    assert torch.equal(back[nan].signbit(), x[nan].signbit())
    # hi is the nearest bfloat16; where it is not torch's, the number lies half-way between two.
    other = hi.view(torch.int16) != x.bfloat16().view(torch.int16)
    assert ((bits(x)[other & ~nan] & 0xFFFF) == 0x8000).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_upper_half_with_lower_halves_at_the_edges(implementation: str) -> None:
    upper = torch.arange(1 << 16).unsqueeze(1) << 16
    lower = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    with K.use(implementation):
        check(floats((upper + lower).view(-1)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_lower_half(implementation: str) -> None:
    upper = torch.tensor([0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xBF80, 0xFF7F, 0xFFFF])
    with K.use(implementation):
        check(floats(((upper.unsqueeze(1) << 16) + torch.arange(1 << 16)).view(-1)))


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40))
def test_any_bits(patterns: list[int]) -> None:
    for implementation in IMPLEMENTATIONS:
        with K.use(implementation):
            check(floats(torch.tensor(patterns, dtype=torch.int64)))


def test_twins_agree_on_more_than_one_block() -> None:
    x = floats(torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 32, 200_001)))
    with K.use("reference"):
        wanted = K.split_master(x)
    with K.use("numba"):
        got = K.split_master(x)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_how_often_half_up_differs_from_half_to_even() -> None:
    """Once in 2**17 uniform bit patterns: a tie, and the even neighbour below."""
    x = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0))
    hi, _ = K.split_master(x)
    assert float((hi != x.bfloat16()).double().mean()) < 3e-5


def test_what_is_not_flat_is_refused() -> None:
    with pytest.raises(TypeError, match="x is float64, it must be float32"):
        K.split_master(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x has shape \[2, 3\].*flat and contiguous"):
        K.split_master(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="flat and contiguous"):
        K.split_master(torch.zeros(8)[::2])
    with pytest.raises(ValueError, match="lo has 3 elements where 4 belong"):
        K.join_master(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16))
    with pytest.raises(TypeError, match="lo is int32"):
        K.join_master(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32))
