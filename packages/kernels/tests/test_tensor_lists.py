"""Steps over lists of tensors: each list kernel against the formula in float64, by reference and by Triton; what they refuse.

Without a GPU ``test_triton_interpreter.py`` runs this file once more, in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import meshfold.kernels as K

TRITON = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" or not TRITON else "cuda"
DTYPES = [torch.float32] if TRITON else [torch.float32, torch.float64]
SHAPES = (((5000,), (3, 7), (0,), (64, 65), ()), ((16, 16), (4096,)))  # of odd sizes, and multiples of 16
SETTINGS: dict[str, Any] = dict(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
CORRECTIONS = (0.3, 0.4)
Lists = list[list[Tensor]]


@pytest.fixture(autouse=True)
def chosen(automatic: None) -> Iterator[None]:
    with K.use("triton" if TRITON else "reference"):
        yield


def lists(count: int, shapes: tuple[tuple[int, ...], ...]) -> Lists:
    """Lists of tensors in float64; the last one is at least 0."""
    generator = torch.Generator().manual_seed(1)
    made = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(count)]
    made[-1] = [one.abs() for one in made[-1]]
    return made


def near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, exact in zip(found, wanted, strict=True):
        wide = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[one.dtype]
        torch.testing.assert_close(one.cpu().double(), exact, rtol=wide, atol=min(wide, 1e-5))


def direction(p: Tensor, m: Tensor, v: Tensor, decay: float) -> Tensor:
    return m / CORRECTIONS[0] / (v.sqrt() / CORRECTIONS[1] + 1e-6) + decay * p


def moments(g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g


@pytest.fixture(params=[(shapes, dtype) for shapes in SHAPES for dtype in DTYPES], ids=str)
def given(request: pytest.FixtureRequest) -> Callable[[int], tuple[Lists, Lists]]:
    """Makes lists of a dtype, and the same numbers in float64."""
    shapes, dtype = request.param

    def make(count: int) -> tuple[Lists, Lists]:
        made = [[one.to(DEVICE, dtype) for one in row] for row in lists(count, shapes)]
        return made, [[one.cpu().double().clone() for one in row] for row in made]

    return make


def test_lamb(given: Callable[[int], tuple[Lists, Lists]]) -> None:
    (p, g, m, v), exact = given(4)
    sums = K.lamb_moment_lists(p, g, m, v, **SETTINGS, corrections=CORRECTIONS)
    wanted_m, wanted_v = zip(*(moments(*some) for some in zip(*exact[1:], strict=True)), strict=True)
    u = [direction(*some, 0.1) for some in zip(exact[0], wanted_m, wanted_v, strict=True)]
    near([*m, *v], [*wanted_m, *wanted_v])
    assert sums.dtype == torch.float64
    for row, ones in zip(sums.cpu(), (exact[0], u), strict=True):
        torch.testing.assert_close(row, torch.stack([one.square().sum() for one in ones]), rtol=1e-5, atol=0)
    rates = torch.linspace(0.1, 0.5, len(p), dtype=torch.float64)
    copies = [torch.full_like(one, 7, dtype=torch.bfloat16) for one in p]
    K.lamb_apply_lists(p, m, v, copies, rates.to(DEVICE), eps=1e-6, weight_decay=0.1, corrections=CORRECTIONS)
    moved = [x - rate * one for x, rate, one in zip(exact[0], rates, u, strict=True)]
    near([*p, *copies], [*moved, *moved])


def test_adamw_and_lion(given: Callable[[int], tuple[Lists, Lists]]) -> None:
    (p, g, m, v), exact = given(4)
    copies = [torch.full_like(one, 7, dtype=torch.float16) for one in p]
    K.adamw_lists(p, g, m, v, copies, lr=0.3, **SETTINGS, corrections=CORRECTIONS)
    wanted = []
    for x, *some in zip(*exact, strict=True):
        mean, square = moments(*some)
        wanted.append([x * (1 - 0.3 * 0.1) - 0.3 * direction(x, mean, square, 0.0), mean, square])
    for found, place in ((p, 0), (copies, 0), (m, 1), (v, 2)):
        near(found, [one[place] for one in wanted])

    (p, g, m), exact = given(3)
    K.lion_lists(p, g, m, None, lr=0.3, betas=(0.8, 0.95), weight_decay=0.1)
    near(p, [x - 0.3 * ((0.8 * b + 0.2 * a).sign() + 0.1 * x) for x, a, b in zip(*exact, strict=True)])
    near(m, [0.95 * b + 0.05 * a for _, a, b in zip(*exact, strict=True)])


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_and_updates(given: Callable[[int], tuple[Lists, Lists]], nesterov: bool) -> None:
    (p, g, m), exact = given(3)
    for dtype in (torch.bfloat16, p[0].dtype):
        (p, g, m), exact = given(3)
        ahead = [torch.empty_like(one, dtype=dtype) for one in g]
        K.average_lists(g, m, ahead, momentum=0.9, nesterov=nesterov)
        means = [0.9 * b + 0.1 * a for _, a, b in zip(*exact, strict=True)]
        near(m, means)
        wanted = [0.1 * a + 0.9 * b for (_, a, _), b in zip(zip(*exact, strict=True), means, strict=True)]
        near(ahead, wanted if nesterov else means)
        updates = [one.cpu().double().clone() for one in ahead]
        K.apply_lists(p, ahead, None, keep=0.7, rate=0.2)
        near(p, [0.7 * x - 0.2 * one for x, one in zip(exact[0], updates, strict=True)])


def test_what_cannot_be_stepped_is_refused() -> None:
    p, g, m, v = lists(4, ((4, 3), (2,)))
    settings = dict(**SETTINGS, corrections=CORRECTIONS)
    with K.use("reference"):
        with pytest.raises(ValueError, match="give one for each"):
            K.lamb_moment_lists(p, g[:1], m, v, **settings)
        with pytest.raises(ValueError, match="contiguous"):
            K.lamb_moment_lists(p, [g[0].t().contiguous().t(), g[1]], m, v, **settings)
        with pytest.raises(TypeError, match="float32"):
            K.lamb_moment_lists(p, [one.float() for one in g], m, v, **settings)
        with pytest.raises(TypeError, match="convert them first"):
            K.average_lists([one.half() for one in g], m, m, momentum=0.9, nesterov=True)
