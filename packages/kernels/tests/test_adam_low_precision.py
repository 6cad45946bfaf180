"""Moments in 16 and 8 bits: rounding without bias, and training that comes out where float32 moments do."""

from __future__ import annotations

import pytest
import torch
from adam_cases import normal, state
from torch import Tensor

from meshfold import kernels as K
from meshfold.kernels import float_bits
from meshfold.kernels.random_bits import stream

NOISE = int(stream(1, float_bits.noise_key(2)))


def noise16(n: int, start: int = 0) -> tuple[Tensor, Tensor]:
    random = float_bits.noise(NOISE, start, n, torch.device("cpu"))
    return random >> 16, random & 0xFFFF


def test_noise_is_uniform_and_both_halves_independent() -> None:
    n = 1 << 18
    upper, lower = noise16(n, start=(1 << 16) * 77 + 5)
    for half in (upper, lower):
        u = half.double() / 65536
        assert int(half.min()) >= 0 and int(half.max()) < 65536
        assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / n) ** 0.5
        assert abs(float(u.var()) - 1 / 12) < 0.001
        for distance in (1, 2, 256, 65_536):
            pair = torch.stack((u[:-distance], u[distance:]))
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / (n - distance) ** 0.5
    assert abs(float(torch.corrcoef(torch.stack((upper.double(), lower.double())))[0, 1])) < 5 / n**0.5
    other = float_bits.noise(int(stream(1, float_bits.noise_key(3))), 0, n, torch.device("cpu")) >> 16
    assert abs(float(torch.corrcoef(torch.stack((noise16(n)[0].double(), other.double())))[0, 1])) < 5 / n**0.5


def test_stochastic_rounding_to_bfloat16_has_no_bias() -> None:
    x = torch.tensor([1.0, 1.001, -3.1415927, 1e-30, 65504.5, 0.0]).repeat_interleave(1 << 16)
    rounded = float_bits.stochastic(x, noise16(x.numel())[0]).float().view(6, -1)
    exact = x.view(6, -1)[:, 0]
    spacing = exact.abs() * 2.0**-7
    assert ((rounded.double().mean(1) - exact).abs() <= spacing * 0.5 * 5 / 256).all()
    assert ((rounded - exact.unsqueeze(1)).abs() <= spacing.unsqueeze(1)).all()
    assert (rounded[0] == 1).all() and (rounded[5] == 0).all()


def test_rounding_keeps_what_is_not_finite() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan]).repeat(1000)
    x[2::3] = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF]).repeat(334)[:1000].to(torch.int32).view(torch.float32)
    rounded = float_bits.stochastic(x, noise16(3000)[0])
    assert (rounded[0::3] == torch.inf).all() and (rounded[1::3] == -torch.inf).all() and rounded[2::3].isnan().all()


@pytest.mark.parametrize("code", [float_bits.SIGNED_CODE, float_bits.UNSIGNED_CODE], ids=["4+3", "4+4"])
def test_codes_are_exact_on_their_grid_and_unbiased_between(code: float_bits.Minifloat) -> None:
    every = torch.arange(code.last + 1)
    scale, inverse = float_bits.scales(torch.tensor([3.7]), code)
    grid = float_bits.decode(every, scale, code)
    assert grid[0] == 0 and (grid[1:] > grid[:-1]).all()
    torch.testing.assert_close(grid[-1], torch.tensor(3.7))
    # Relative distance of neighbours in the thirteen upper octaves, and the smallest number.
    first = 3 << code.mantissa
    assert float(((grid[first + 1 :] - grid[first:-1]) / grid[first + 1 :]).max()) < 8 / 7 * 2.0**-code.mantissa
    assert float(grid[1]) < 3.7 * 2.0 ** -(15 + code.mantissa)
    x = torch.rand(40, generator=torch.Generator().manual_seed(0)) ** 3 * 3.7
    many = x.repeat_interleave(1 << 14)
    q = float_bits.encode(many, inverse, noise16(many.numel())[1], code)
    assert int(q.min()) >= 0 and int(q.max()) <= code.last
    mean = float_bits.decode(q, scale, code).double().view(40, -1).mean(1)
    above = torch.searchsorted(grid, x).clamp(1, code.last)
    assert ((mean - x).abs() <= (grid[above] - grid[above - 1]) * 0.5 * 5 / 128 + 1e-6).all()


@pytest.mark.parametrize(("kind", "within"), [("B", 0.06), ("C", 0.6)])
def test_a_second_moment_follows_gradients_that_shrink(kind: str, within: float) -> None:
    """A hundred-fold smaller square: to the nearest, bfloat16 and 8-bit codes alike would stay where they were."""
    n, chosen = 4096, K.AdamSettings(lr=0.0, beta2=0.99)
    made, exact = state(kind, torch.zeros(n)), state("A", torch.zeros(n))
    grad = torch.ones(n)
    grad[1::2] = 0.5
    for step in range(1, 901):
        if step == 200:
            grad[1::2] = 0.05  # the scale of the block stays with its neighbours
        for each in (made, exact):
            K.adam_step(each, grad, chosen, step=step)
    if isinstance(made, K.QuantizedState):
        v = float_bits.decode(made.exp_avg_sq, made.exp_avg_sq_scale.repeat_interleave(256), float_bits.UNSIGNED_CODE)
    else:
        v = made.exp_avg_sq.float()
    small = v[1::2].double()
    wanted = float(exact.exp_avg_sq[1])
    assert 0.0025 < wanted < 0.003
    assert abs(float(small.mean()) / wanted - 1) < 0.03
    assert float((small / wanted - 1).std()) < within


def regression(kind: str) -> list[float]:
    """Distances from the solution over 1000 steps of least squares with noise.

    Features of unlike scales, so that a block holds gradients of two and a half orders of magnitude.
    """
    features, batch, draw = 512, 64, torch.Generator().manual_seed(0)
    scales = 10 ** torch.linspace(-1.25, 1.25, features)[torch.randperm(features, generator=draw)]
    truth = torch.randn(features, generator=draw)
    made, found, chosen = state(kind, torch.zeros(features)), [], K.AdamSettings(lr=1e-2)
    for step in range(1, 1001):
        x = torch.randn(batch, features, generator=draw)
        distance = made.master() - truth
        residual = x @ distance + 0.1 * torch.randn(batch, generator=draw)
        found.append(float(distance.square().mean()))
        K.adam_step(made, scales * (x.t() @ residual) / batch, chosen, step=step, seed=9)
    return found


def test_a_regression_trains_as_with_float32_moments() -> None:
    wanted = regression("whole")
    assert wanted[-1] < 0.02 * wanted[0]
    assert regression("A") == wanted
    for kind, slack in (("B", 1.1), ("C", 1.5)):
        got = regression(kind)
        assert sum(got[-50:]) <= slack * sum(wanted[-50:]), kind
        assert sum(got) <= (1 + (slack - 1) / 4) * sum(wanted), kind


def test_a_second_moment_of_8_bits_is_zero_only_if_it_is() -> None:
    grad = torch.full((256,), 1e-8)
    grad[0], grad[1:10] = 1.0, 0.0
    made = state("C", torch.zeros(256))
    for step in range(1, 50):
        K.adam_step(made, grad, K.AdamSettings(lr=1e-3), step=step)
    assert torch.equal(made.exp_avg_sq == 0, grad == 0)
    assert float(made.master()[10:].abs().max()) < 49e-3


def test_very_small_and_very_large_blocks() -> None:
    for size in (1e-38, 1e-12, 1e12, 1e18):
        results = []
        for implementation in ("reference", "numba"):
            with K.use(implementation):
                made = state("C", torch.zeros(512))
                for step in (1, 2, 3):
                    K.adam_step(made, normal(512, step) * size, K.AdamSettings(), step=step)
                results.append(made)
                assert made.master().isfinite().all()
        for a, b in zip(vars(results[0]).values(), vars(results[1]).values(), strict=True):
            assert torch.equal(a, b)
