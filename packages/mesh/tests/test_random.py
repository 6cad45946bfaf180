"""Random numbers by global element: the published formula, the same bits for every split, and sound distributions."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshfold.mesh.random import (
    fill_normal_,
    fill_truncated_normal_,
    fill_uniform_,
    key_of,
    loops,
    normal,
    random_bits,
    stream_state,
    uniform,
)
from meshfold.mesh.random import numbers as random

WORD = (1 << 64) - 1
FILLS = [fill_uniform_, fill_normal_, fill_truncated_normal_]
devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    ],
)


def splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def whole(shape: tuple[int, ...]) -> list[Tensor]:
    return [torch.arange(size) for size in shape]


def test_splitmix64_gives_its_published_numbers() -> None:
    # The first outputs of the reference generator seeded with 1234567.
    outputs = [splitmix64((1234567 + n * 0x9E3779B97F4A7C15) & WORD) for n in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@devices
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(-(2**63), 2**64 - 1), key=st.integers(0, 2**64 - 1), start=st.integers(0, 2**50))
def test_bits_and_uniform_follow_the_formula(device: str, seed: int, key: int, start: int) -> None:
    index = [start, start + 1, start + 77, 2**62 + start]
    state = splitmix64(splitmix64(seed & WORD) ^ splitmix64(key))
    expected = [splitmix64((state + i * 0x9E3779B97F4A7C15) & WORD) for i in index]
    tensor = torch.tensor(index, device=device)
    assert stream_state(seed, key) == state
    assert [bits & WORD for bits in random_bits(seed, key, tensor).tolist()] == expected
    assert uniform(seed, key, tensor).tolist() == [(z >> 40) / 2**24 for z in expected]
    assert uniform(seed, key, tensor, torch.float64).tolist() == [(z >> 11) / 2**53 for z in expected]


@devices
def test_normal_is_box_and_mullers(device: str) -> None:
    seed, key, index = 3, key_of("w"), torch.arange(4096)
    got = normal(seed, key, index.to(device), torch.float64).cpu()
    u = ((random_bits(seed, key, index) >> 11) & (2**53 - 1)).double().add(1) / 2**53
    v = ((random_bits(seed, key ^ 0x5851F42D4C957F2D, index) >> 11) & (2**53 - 1)).double() / 2**53
    expected = (-2 * u.log()).sqrt() * torch.sin(2 * math.pi * (v / 2 - 0.25))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-15)


def test_normal_stays_finite_at_the_ends_of_the_uniform_range(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, least, most in ((0, 8.5, 8.6), (-1, 0.0, 1e-7)):  # u = 2^-53 and u = 1
        monkeypatch.setattr(random, "_mix_", lambda z, word=word: torch.full_like(z, word))
        (value,) = normal(0, 0, torch.tensor([0]), torch.float64).abs().tolist()
        assert least <= value <= most


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 9), (3, 1, 6), (2, 3, 4, 5)])
@pytest.mark.parametrize("fill", FILLS)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_any_split_holds_the_numbers_of_the_whole(fill: object, shape: tuple[int, ...], data: st.DataObject) -> None:
    full = fill(torch.empty(shape), whole(shape), shape, seed=5, key=9)
    # Any positions in any order and number, padding (beyond the size) among them.
    points = [
        torch.tensor(data.draw(st.lists(st.integers(0, size + 2), max_size=12)), dtype=torch.int64) for size in shape
    ]
    local = fill(torch.full([len(p) for p in points], math.nan), points, shape, seed=5, key=9)
    expected = full
    for dim, p in enumerate(points):
        expected = torch.cat([expected, expected.new_zeros(*expected.shape[:dim], 3, *expected.shape[dim + 1 :])], dim)
        expected = expected.index_select(dim, p)
    assert torch.equal(local, expected)


def test_square_roots_are_rounded_to_the_nearest() -> None:
    x = torch.rand(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 70
    assert random._sqrt_(x.clone()).tolist() == [math.sqrt(value) for value in x.tolist()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", [fill_uniform_, fill_normal_])
def test_compiled_loops_give_the_bits_of_torch(
    fill: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba", reason="needs numba, which meshfold-kernels installs")
    ranges = {fill_uniform_: dict(low=-0.3, high=0.7), fill_normal_: dict(mean=0.1, std=0.02)}[fill]
    settings = dict(seed=-5, key=key_of("w"), **ranges)
    cases = [
        (torch.empty((), dtype=dtype), [], (), {}),
        (torch.empty(1031, dtype=dtype), whole((1031,)), (1031,), {}),
        (torch.empty(3, 4, 5, dtype=dtype), whole((3, 4, 5)), (3, 4, 5), dict(strides=(1, 15, 3), offset=7)),
        (torch.empty(64, 40, dtype=dtype).t(), whole((40, 64)), (40, 64), {}),
        (torch.empty(0, 4, dtype=dtype), [torch.arange(0), torch.arange(4)], (9, 4), {}),
        # padding, and coordinates in any order, far from the origin
        (torch.empty(3, 2, dtype=dtype), [torch.tensor([2**40, 7, 3]), torch.tensor([8, 0])], (2**40 + 1, 8), {}),
        (torch.empty(512, 515, dtype=dtype), whole((512, 515)), (512, 515), {}),  # by two threads
        (nn.Parameter(torch.empty(7, 9, dtype=dtype)), whole((7, 9)), (7, 9), {}),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for local, points, shape, more in cases:
            monkeypatch.setattr(loops, "COMPILE_AFTER", math.inf)
            expected = fill(torch.empty_like(local), points, shape, **settings, **more).detach().clone()
            monkeypatch.setattr(loops, "COMPILE_AFTER", 0)
            with mock.patch.object(random, "_mix_", side_effect=AssertionError("drawn by torch")):
                fill(local, points, shape, **settings, **more)
            assert torch.equal(local.detach(), expected), shape
    finally:
        torch.set_num_threads(threads)


def test_a_process_that_draws_few_numbers_loads_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_drawn", 0)
    monkeypatch.setattr(loops, "COMPILE_AFTER", 8)
    monkeypatch.setattr(loops, "_kernels", object)
    x = torch.empty(4)
    assert [loops.is_compiled(x) for _ in range(4)] == [False, False, True, True]
    assert not loops.is_compiled(torch.empty(4, device="meta"))
    monkeypatch.undo()
    monkeypatch.setattr(loops, "COMPILE_AFTER", 0)
    loops._kernels.cache_clear()
    try:
        with mock.patch("importlib.import_module", side_effect=RuntimeError("no locator available")):
            assert not loops.is_compiled(x), "numba has no folder for its cache"
    finally:
        loops._kernels.cache_clear()


@devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", [fill_uniform_, fill_normal_])
def test_same_bits_for_every_block_size_thread_count_and_device(
    fill: object, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (7, 5, 1031)
    expected = fill(torch.empty(shape, dtype=dtype), whole(shape), shape, seed=1, key=2)
    threads = torch.get_num_threads()
    try:
        for limit, count in ((100, 1), (999, 2), (1031, 1), (5155, 3), (100_000, 2)):
            monkeypatch.setattr(random, "_BLOCK_ON_CPU", limit)
            monkeypatch.setattr(random, "_BLOCK_ON_DEVICE", limit)
            torch.set_num_threads(count)
            got = fill(torch.empty(shape, dtype=dtype, device=device), whole(shape), shape, seed=1, key=2)
            assert torch.equal(got.cpu(), expected)
    finally:
        torch.set_num_threads(threads)


def test_one_number_does_not_depend_on_its_neighbours() -> None:
    index = torch.arange(5000, 5100)
    together = normal(1, 2, index, torch.float64)
    alone = torch.cat([normal(1, 2, i.reshape(1), torch.float64) for i in index])
    assert torch.equal(together, alone)


def test_a_transposed_and_a_strided_block_are_filled_in_place() -> None:
    expected = fill_normal_(torch.empty(6, 4), whole((6, 4)), (6, 4), seed=1, key=2)
    storage = torch.zeros(4, 12)
    fill_normal_(storage[:, ::2].t(), whole((6, 4)), (6, 4), seed=1, key=2)
    assert torch.equal(storage[:, ::2].t(), expected)
    assert not storage[:, 1::2].any()
    other = fill_normal_(torch.empty(4, 6), whole((4, 6)), (4, 6), seed=1, key=2, strides=(1, 4))
    assert torch.equal(other.t(), expected)
    tail = fill_normal_(torch.empty(2, 4), whole((2, 4)), (2, 4), seed=1, key=2, offset=16)
    assert torch.equal(tail, expected[4:])


def test_bfloat16_is_float32_rounded() -> None:
    for fill in FILLS:
        wide = fill(torch.empty(500), whole((500,)), (500,), seed=1, key=2)
        narrow = fill(torch.empty(500, dtype=torch.bfloat16), whole((500,)), (500,), seed=1, key=2)
        assert torch.equal(narrow, wide.bfloat16())


def distance(sample: Tensor, cdf: Tensor) -> float:
    """The Kolmogorov-Smirnov statistic times sqrt(n): above 1.95 once in a thousand."""
    n = sample.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((cdf - steps[:-1]).abs(), (steps[1:] - cdf).abs()).max()) * math.sqrt(n)


@pytest.mark.parametrize("key", ["a", "layers.0.mlp.up.weight"])
def test_distributions(key: str) -> None:
    n = 1 << 18
    u = fill_uniform_(torch.empty(n, dtype=torch.float64), whole((n,)), (n,), seed=0, key=key_of(key), low=-1, high=3)
    assert u.min() >= -1 and u.max() < 3
    u = u.sort().values
    assert distance(u, (u + 1) / 4) < 1.95
    z = normal(0, key_of(key), torch.arange(n), torch.float64)
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96 / n)
    z = z.sort().values
    assert distance(z, torch.special.ndtr(z)) < 1.95


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (-0.5, 3.0), (1.0, 2.0), (6.0, 9.0), (-9.0, -6.0)])
def test_truncated_normal(low: float, high: float) -> None:
    n = 1 << 16
    kinds = {"mean": 0.3, "std": 1.5, "low": 0.3 + 1.5 * low, "high": 0.3 + 1.5 * high}
    z = fill_truncated_normal_(torch.empty(n, dtype=torch.float64), whole((n,)), (n,), seed=0, key=1, **kinds)
    z = (z.sort().values - 0.3) / 1.5
    assert z[0] >= low - 1e-12 and z[-1] <= high + 1e-12
    sign = -1 if low > 0 else 1  # the distribution function has its precision in the lower tail
    bounds = torch.tensor([low, high], dtype=torch.float64)
    start, stop = torch.special.ndtr(sign * bounds)
    assert distance(z, (torch.special.ndtr(sign * z) - start) / (stop - start)) < 1.95


def test_seeds_keys_and_neighbours_are_independent() -> None:
    n = 1 << 16
    index = torch.arange(n)
    streams = [normal(seed, key, index, torch.float64) for seed in (0, 1) for key in map(key_of, "abcd")]
    streams += [streams[0].roll(1), streams[0].roll(512)]
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams), dtype=torch.float64)
    assert correlation.abs().max() < 5 / math.sqrt(n)
    squares = torch.corrcoef(torch.stack(streams) ** 2) - torch.eye(len(streams), dtype=torch.float64)
    assert squares.abs().max() < 5 / math.sqrt(n)
    assert len({random_bits(0, key, torch.tensor([0])).item() for key in range(1000)}) == 1000


def test_keys_are_stable() -> None:
    assert key_of("layers.0.mlp.up.weight") == 5790388356788577630
    assert all(0 <= key_of(str(n)) < 2**63 for n in range(1000))
    assert len({key_of(str(n)) for n in range(1000)}) == 1000


@pytest.mark.parametrize("drawn", [0, loops.COMPILE_AFTER], ids=["torch", "loops"])
def test_temporaries_are_bounded(drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_drawn", drawn)
    n = 1 << 20  # eight blocks
    local = torch.empty(n, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fill_normal_(local, whole((n,)), (n,), seed=0, key=0)
    large = [event for event in profile.events() if event.cpu_memory_usage > 4 * n]
    assert max(event.cpu_memory_usage for event in large) <= 2 * 8 * n  # never a tensor of several float64 a element
    names = {event.name for event in large}
    assert names <= {"aten::arange", "aten::mul", "aten::resize_"}, (
        names
    )  # the coordinates and their copy; the rest is of a block


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.empty(2, 3), [torch.arange(2)], (2, 3)), "one coordinate for each position"),
        ((torch.empty(2, 3), [torch.arange(2), torch.arange(2)], (2, 3)), "one coordinate for each position"),
        ((torch.empty(2), [torch.arange(2)], (2, 1)), "one coordinate for each position"),
        ((torch.empty(2), [torch.tensor([0, -1])], (2,)), "not negative"),
        ((torch.empty(2), [torch.tensor([0.0, 1.0])], (2,)), "int64"),
        ((torch.empty(2, dtype=torch.int64), [torch.arange(2)], (2,)), "floating point"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fill_uniform_(*arguments, seed=0, key=0)


def test_an_empty_truncated_range_is_refused() -> None:
    with pytest.raises(ValueError, match="low < high"):
        fill_truncated_normal_(torch.empty(2), whole((2,)), (2,), seed=0, key=0, low=1.0, high=1.0)
