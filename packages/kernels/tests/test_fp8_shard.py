"""Runs of a weight that ranks cast to fp8 with the scales of the whole: the same bits as a cast of the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfold.kernels import FP8_RECIPES, Fp8Shard, Fp8Tensor, fp8_cast_weight, fp8_operand, weight_scales
from meshfold.kernels.fp8_shard import rectangles


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 17))
def test_rectangles_cover_a_run_once(start: int, length: int, width: int) -> None:
    found = rectangles(start, length, width)
    places = [
        (one.row + r) * width + one.column + c for one in found for r in range(one.rows) for c in range(one.columns)
    ]
    assert places == [*range(start, start + length)]
    assert [one.at for one in found] == [sum(o.rows * o.columns for o in found[:i]) for i in range(len(found))]
    assert len(found) <= 3


def same(got: Fp8Tensor, want: Fp8Tensor) -> None:
    assert torch.equal(got.inverse.nan_to_num(-1.0), want.inverse.nan_to_num(-1.0))
    lost = want.values.float().isnan()
    assert torch.equal(got.values.float().isnan(), lost)
    bits = (each.values.view(torch.uint8).masked_fill(lost, 0) for each in (got, want))
    assert torch.equal(*bits)


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "with nan and infinity"])
@pytest.mark.parametrize("cuts", [(0, 32 * 48), (0, 100, 101, 700, 32 * 48), (0, 0, 40, 32 * 48)], ids=str)
@pytest.mark.parametrize("name", ["rowwise", "tensorwise"])
def test_runs_have_the_bits_of_the_whole(name: str, cuts: tuple[int, ...], odd: bool) -> None:
    recipe, (n, k) = FP8_RECIPES[name], (32, 48)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(n, k, generator=generator) * torch.logspace(-20, 3, n, base=2.0)[:, None]
    w *= torch.logspace(-15, 3, k, base=2.0)  # small numbers are rounded by the scale of their row, or column
    w[3], w[:, 5] = 0.0, 0.0
    if odd:
        w[7, 9], w[20, 0] = float("nan"), float("-inf")
    w = w.bfloat16()
    flat = w.view(-1)
    runs = [*pairwise(cuts)]
    shards = [Fp8Shard(recipe, (n, k), start, stop - start) for start, stop in runs]
    parts = []
    for shard, (start, stop) in zip(shards, runs, strict=True):
        amax = torch.zeros(shard.scales)
        shard.add_amax(flat[start:stop], amax)
        parts.append(torch.where(amax.isfinite(), amax, torch.inf))
    scale = weight_scales(torch.stack(parts).amax(0), recipe)
    found = []
    for columns in (False, True):
        out = torch.empty(n * k, dtype=torch.float8_e4m3fn)
        for shard, (start, stop) in zip(shards, runs, strict=True):
            shard.cast(flat[start:stop], scale, out[start:stop], columns=columns and recipe.rows)
        found.append(out.view(n, k))
    inverse = scale.reciprocal()
    one, other = (inverse[:n, None], inverse[n:, None]) if recipe.rows else (inverse[0], inverse[0])
    y, dx = fp8_cast_weight(w, recipe)
    same(Fp8Tensor(values=found[0], inverse=one), y)
    turned = fp8_operand(found[1].t(), other, recipe)
    assert turned.values.is_contiguous()
    same(turned, dx)
