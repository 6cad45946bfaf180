"""The pass over a gradient: exact sums in a fixed order, not finite where the gradient is not, and casts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from adam_cases import normal, raw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold import kernels as K

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = {2.0: K.sum_of_squares, 1.0: K.sum_of_magnitudes, math.inf: K.largest_magnitude}
both = pytest.mark.parametrize("implementation", ["reference", "numba"])


def defined(x: Tensor, norm: float, block: int, start: int) -> list[float]:
    """The definition in Python floats: lanes first, then halves."""
    found: dict[int, list[float]] = {}
    for i, value in enumerate(x.float().tolist()):
        lanes = found.setdefault((start + i) // block, [0.0] * 1024)
        lane = (start + i) % block % 1024
        if norm == math.inf:
            lanes[lane] = max(lanes[lane], abs(value))
        else:
            lanes[lane] += value * value if norm == 2 else abs(value)
    sums = []
    for lanes in found.values():
        while len(lanes) > 1:
            half = len(lanes) // 2
            pairs = zip(lanes[:half], lanes[half:], strict=True)
            lanes = [max(a, b) if norm == math.inf else a + b for a, b in pairs]
        sums.append(lanes[0])
    return sums


@both
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("n", "block", "start"), [(5000, 2048, 0), (3000, 1024, 777), (1, 65_536, 70_000), (0, 1024, 5)]
)
def test_partial_norms_are_the_definition(implementation: str, norm: float, n: int, block: int, start: int) -> None:
    x = normal(n, 1)
    with K.use(implementation):
        assert NORMS[norm](x, block, start).tolist() == defined(x, norm, block, start)


@settings(max_examples=25, deadline=None)
@given(
    n=st.one_of(st.integers(0, 5000), st.integers(60_000, 200_000)),
    dtype=st.sampled_from(DTYPES),
    norm=st.sampled_from(list(NORMS)),
    block=st.sampled_from([1024, 5120, 65_536]),
    start=st.integers(0, 1 << 40),
    bad=st.sampled_from([0.0, math.inf, -math.inf, math.nan]),
)
def test_numba_gives_the_bits_of_the_reference(
    n: int, dtype: torch.dtype, norm: float, block: int, start: int, bad: float
) -> None:
    x = normal(n, 3, dtype)
    if n:
        x[n // 2] = bad
    results = []
    for implementation in ("numba", "reference"):
        with K.use(implementation):
            results.append(NORMS[norm](x, block, start))
            assert bool(results[-1].isfinite().all()) == bool(x.isfinite().all())
    assert torch.equal(raw(results[0]), raw(results[1]))


@both
def test_any_sharding_at_blocks_has_the_same_bits(implementation: str) -> None:
    x, block = normal(300_000, 4, torch.bfloat16), 65_536
    with K.use(implementation):
        whole = K.sum_of_squares(x, start=block * 7)
        for cuts in ([0, 65_536, 300_000], [0, 131_072, 196_608, 300_000]):
            parts = [K.sum_of_squares(x[a:z], start=block * 7 + a) for a, z in pairwise(cuts)]
            assert torch.equal(torch.cat(parts), whole)
    torch.testing.assert_close(whole.sum(), x.double().square().sum(), rtol=1e-13, atol=0)


@both
@pytest.mark.parametrize("out_dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_written_is_what_torch_writes(implementation: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x, there = normal(5000, 7, dtype), normal(5000, 8, out_dtype)
    with K.use(implementation):
        K.write_gradient(x, out := there.clone())
        assert torch.equal(out, x.to(out_dtype))
        K.write_gradient(x, out := there.clone(), add=True)
        assert torch.equal(out, (there + x).to(out_dtype))


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(8)
    with pytest.raises(ValueError, match="block is 1000; it must be a multiple of 1024"):
        K.sum_of_squares(x, 1000)
    with pytest.raises(ValueError, match="start is -5"):
        K.sum_of_squares(x, start=-5)
    with pytest.raises(TypeError, match="x is float64"):
        K.sum_of_squares(x.double())
    with pytest.raises(ValueError, match="out has 7 elements where 8 belong"):
        K.write_gradient(x, x[:7])
    with pytest.raises(TypeError, match="out is int16"):
        K.write_gradient(x, torch.zeros(8, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"source has shape \[2, 4\]"):
        K.write_gradient(x.view(2, 4), x)
