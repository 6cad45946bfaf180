"""The hash against its definition in Python integers, and dropout against the hash."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold import kernels as K
from meshfold.kernels.random_bits import splitmix64, top24

MASK = (1 << 64) - 1
IMPLEMENTATIONS = ("reference", "numba")
integers = st.integers(-(1 << 63), (1 << 64) - 1)


def exact_bits(seed: int, key: int, index: int) -> int:
    state = splitmix64(splitmix64(seed & MASK) ^ splitmix64(key & MASK))
    return splitmix64((state + index * 0x9E3779B97F4A7C15) & MASK)


def test_splitmix64_is_the_published_one() -> None:
    """The first three outputs of the generator seeded with 1234567, as published with the algorithm."""
    golden = 0x9E3779B97F4A7C15
    outputs = [splitmix64((1234567 + i * golden) & MASK) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(max_examples=60, deadline=None)
@given(seed=integers, key=integers, index=st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=8))
def test_random_bits_are_the_definition(seed: int, key: int, index: list[int]) -> None:
    got = K.random_bits(seed, key, torch.tensor(index))
    assert [b & MASK for b in got.tolist()] == [exact_bits(seed, key, i) for i in index]


def test_a_seed_in_a_tensor_is_the_same_seed() -> None:
    index = torch.arange(100)
    wanted = K.random_bits(-5, 7, index)
    assert torch.equal(K.random_bits(torch.tensor(-5), 7, index), wanted)
    assert torch.equal(K.random_bits(-5, torch.tensor(7), index), wanted)
    with pytest.raises(TypeError, match="int64"):
        K.random_bits(0, 0, index.float())


def test_bits_are_uniform_and_streams_independent() -> None:
    n = 1 << 16
    index = torch.arange(n)
    streams = [top24(K.random_bits(seed, key, index)).double() / 2**24 for seed, key in ((0, 0), (0, 1), (1, 2))]
    for u in streams:
        assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / n) ** 0.5
        assert abs(float(u.var()) - 1 / 12) < 0.002
        assert abs(float(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1])) < 5 / n**0.5
    correlation = torch.corrcoef(torch.stack(streams))
    assert float((correlation - torch.eye(3, dtype=torch.float64)).abs().max()) < 5 / n**0.5
    # Every one of the 64 bits is set half the time.
    bits = K.random_bits(3, 4, index)
    shares = torch.stack([((bits >> i) & 1).double().mean() for i in range(64)])
    assert float((shares - 0.5).abs().max()) < 5 * 0.5 / n**0.5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dropout_keeps_what_the_bits_say(implementation: str, dtype: torch.dtype) -> None:
    x = torch.arange(1, 13, dtype=dtype).view(3, 4).requires_grad_()
    p, seed, key, row, col, wide = 0.3, 11, -2, 5, 2, 9
    with K.use(implementation):
        y = K.dropout(x, p, seed, key, row, col, wide)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    keep = torch.tensor(
        [[(exact_bits(seed, key, (row + r) * wide + col + c) >> 40) / 2**24 >= p for c in range(4)] for r in range(3)]
    )
    assert keep.any() and not keep.all()
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    assert torch.equal(y, torch.where(keep, x.to(compute) * (1 / (1 - p)), 0.0).to(dtype))
    assert torch.equal(dx, torch.where(keep, torch.ones(3, 4, dtype=compute) * (1 / (1 - p)), 0.0).to(dtype))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 40),
    p=st.floats(0.01, 1.0),
    seed=integers,
    key=integers,
    row=st.integers(0, 1 << 40),
    col=st.integers(0, 100),
    extra=st.integers(0, 5),
    strided=st.booleans(),
)
def test_numba_drops_what_the_reference_drops(
    rows: int, columns: int, p: float, seed: int, key: int, row: int, col: int, extra: int, strided: bool
) -> None:
    x = torch.randn(rows, 2 * columns)[:, ::2] if strided else torch.randn(rows, columns)
    arguments = (p, seed, key, row, col, col + columns + extra)
    with K.use("reference"):
        wanted = K.dropout(x, *arguments)
    with K.use("numba"):
        assert torch.equal(K.dropout(x, *arguments), wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_layout_drops_the_same_elements(implementation: str) -> None:
    x = torch.randn(2, 6, 8)
    arguments = (0.4, 1, 2)

    def tile(rows: int | Tensor, part: Tensor, col: int) -> Tensor:
        return K.dropout(part, *arguments, rows, col, 8)

    with K.use(implementation):
        whole = K.dropout(x, *arguments)
        by_blocks = torch.cat(
            [torch.cat([tile(6 * b, x[b, :, c : c + 4], c) for c in (0, 4)], -1) for b in range(2)]
        ).view(2, 6, 8)
        assert torch.equal(by_blocks, whole)
        # Rows in an order of their own, as in sequence parallelism: every third.
        flat = x.view(12, 8)
        for first in range(3):
            assert torch.equal(tile(torch.arange(first, 12, 3), flat[first::3], 0), whole.view(12, 8)[first::3])


def test_dropout_ends_of_the_scale_and_expectation() -> None:
    x = torch.ones(200, 500)
    assert K.dropout(x, 0.0, 1, 2) is x and K.dropout(x, 0.5, 1, 2, training=False) is x
    assert (K.dropout(x, 1.0, 1, 2) == 0).all()
    y = K.dropout(x, 0.25, 1, 2)
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert abs(float(y.mean()) - 1.0) < 0.01
    assert not torch.equal(y, K.dropout(x, 0.25, 1, 3)) and not torch.equal(y, K.dropout(x, 0.25, 2, 2))


def test_a_dropped_element_is_zero_whatever_it_was() -> None:
    x = torch.full((8, 8), float("nan"))
    y = K.dropout(x, 0.5, 1, 2)
    assert ((y == 0) | y.isnan()).all() and (y == 0).any()


def test_wrong_arguments_are_refused() -> None:
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"p is 1\.5"):
        K.dropout(x, 1.5, 1, 2)
    with pytest.raises(ValueError, match="columns 3 to 7 do not lie in a row of global_cols = 6"):
        K.dropout(x, 0.5, 1, 2, 0, 3, 6)
    with pytest.raises(ValueError, match="one number for each of the 3 rows"):
        K.dropout(x, 0.5, 1, 2, torch.arange(4))
