"""Every Triton kernel against the float64 reference: on a GPU, or in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so on a machine without a GPU ``test_triton_interpreter.py``
runs this file in a process of its own with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold import kernels as K
from meshfold.kernels import dispatch
from meshfold.kernels.activations import gated, gated_and_cast
from meshfold.kernels.fp8_casts import cast_both, cast_rows, cast_scaled, cast_turned, largest_magnitudes, turn
from meshfold.kernels.norms import whole, whole_and_cast

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("no GPU; test_triton_interpreter.py runs this file in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXAMPLES = 3 if INTERPRETED else 30
Check = Callable[..., None]
Op = Callable[..., Tensor | tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def triton(automatic: None) -> Iterator[None]:
    """Everything here runs in Triton unless a test says otherwise; no silent reference."""
    with K.use("triton"):
        yield


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(DEVICE, dtype)


def near(got: Tensor, exact: Tensor, what: str, scale: float = 1.0) -> None:
    """Computed in float32 and rounded once; the interpreter cuts bfloat16 off where a GPU rounds to nearest."""
    assert got.shape == exact.shape, what
    rounding = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
    if INTERPRETED and got.dtype is torch.bfloat16:
        rounding *= 2
    scale = max(scale, float(exact.detach().abs().max()) if exact.numel() else 0.0)
    excess = (got.detach().double() - exact.detach()).abs() - 1.01 * rounding * exact.detach().abs() - 5e-6 * scale
    assert not got.isnan().any() and (excess.numel() == 0 or float(excess.max()) <= 0), (
        f"{what}: off by {float(excess.max()):.3g} more than allowed, largest element {scale:.3g}"
    )


def agree(op: Op, *inputs: Tensor, reference: Op | None = None, scale: float = 1.0) -> None:
    """Outputs and gradients of ``op`` in Triton near those of the reference on the same numbers in float64."""
    leaves = tuple(t.detach().as_strided(t.shape, t.stride()).requires_grad_() for t in inputs)
    exact_leaves = tuple(t.detach().double().requires_grad_() for t in inputs)
    got = op(*leaves)
    with K.use("reference"):
        wanted = (reference or op)(*exact_leaves)
    got, wanted = ((y,) if isinstance(y, Tensor) else y for y in (got, wanted))
    for i, (y, exact) in enumerate(zip(got, wanted, strict=True)):
        near(y, exact, f"output {i}", scale)
    towards = [seeded(*y.shape, dtype=y.dtype, seed=50 + i) for i, y in enumerate(got)]
    back = torch.autograd.grad(got, leaves, towards)
    exact_back = torch.autograd.grad(wanted, exact_leaves, [t.double() for t in towards])
    for i, (g, exact) in enumerate(zip(back, exact_back, strict=True)):
        assert g.dtype is leaves[i].dtype
        near(g, exact, f"gradient {i}", scale)


SHAPES = [(5, 32), (1, 1), (3, 4, 100), (70, 5), (2, 1030)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def with_dtypes(name: str, cases: list[Any]) -> pytest.MarkDecorator:
    """Parametrize with every case and every dtype. The interpreter takes seconds for many: `make test` takes each case there
    in one dtype of two, by turns, and `make test-all` all of them."""
    pairs = [(dtype, number, case) for dtype in DTYPES for number, case in enumerate(cases)]
    left_out = {(DTYPES[(number + 1) % 2], number) for number in range(len(cases)) if INTERPRETED}
    return pytest.mark.parametrize(
        (name, "dtype"),
        [
            pytest.param(case, dtype, id=f"{dtype}-{case}", marks=[pytest.mark.slow] * ((dtype, number) in left_out))
            for dtype, number, case in pairs
        ],
    )


shapes_and_dtypes = with_dtypes("shape", SHAPES)


# Triton's interpreter takes seconds for several blocks of rows or of columns; the test of a given amax has them, too.
_LARGE = {(shape, dtype) for shape in ((260, 9), (24, 300)) for dtype in (torch.float32, torch.bfloat16)}
_WIDE = (1, 70) if INTERPRETED else (1, 4200)
"""A row that takes two passes, by the fixture ``narrow_passes``."""


@pytest.fixture
def narrow_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a pass over a row takes 64 columns, not 4,096."""
    if INTERPRETED:
        from meshfold.kernels import fp8_casts_triton

        monkeypatch.setattr(fp8_casts_triton, "_COLUMNS", 64)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=pytest.mark.slow if (shape, dtype) in _LARGE else (), id=f"{dtype}-{shape}")
        for dtype in DTYPES
        for shape in [(5, 32), (1, 1), (260, 9), _WIDE, (24, 300)]
    ],
)
@pytest.mark.usefixtures("narrow_passes")
def test_fp8_casts_have_the_bits_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = seeded(*shape, dtype=dtype)
    x *= torch.logspace(-30, 4, shape[0], base=2.0, device=DEVICE)[:, None].to(dtype)
    x[-1, shape[1] // 3] *= 64.0  # the largest of its row, before the last pass over that
    x[0, 0] = 0.0
    if shape[0] > 1:
        x[shape[0] // 2] = 0.0
    odd = x.clone()
    odd[-1, -1], odd[0, shape[1] // 2] = float("inf"), float("nan")
    # Of several blocks the interpreter takes the odd matrix alone: it has the plain one's other elements.
    for matrix in (odd,) if INTERPRETED and x.numel() > 1000 else (x, odd, x[:, : max(1, shape[1] // 2)]):
        for each, cast in zip((matrix, matrix.t()), dispatch.twin(cast_both, matrix)(matrix), strict=True):
            got = K.to_fp8(each, rows=True)
            with K.use("reference"):
                want = K.to_fp8(each, rows=True)
            for values, inverse in ((got.values, got.inverse), cast):
                assert values.is_contiguous() and inverse.shape == want.inverse.shape
                assert torch.equal(inverse.nan_to_num(-1.0), want.inverse.nan_to_num(-1.0))
                lost = want.values.float().isnan()
                assert torch.equal(values.float().isnan(), lost)
                bits = (t.view(torch.uint8).masked_fill(lost, 0) for t in (values, want.values))
                assert torch.equal(*bits)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=pytest.mark.slow if dtype is torch.bfloat16 and max(shape) > 64 else ())
        for shape in [(5, 32), (1, 1), (70, 9), _WIDE]
        for dtype in DTYPES
    ],
    ids=str,
)
@pytest.mark.usefixtures("narrow_passes")
def test_casts_with_given_scales_have_the_bits_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = seeded(*shape, dtype=dtype)
    x[0, 0] = 0.0
    rows, columns = (2.0 ** torch.arange(count, device=DEVICE).remainder(9) for count in shape)
    for along, scale in (("rows", rows), ("columns", columns), ("none", torch.tensor([3.7], device=DEVICE))):
        got, want = (torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in range(2))
        dispatch.twin(cast_scaled, x)(x, scale, got, along)
        cast_scaled(x, scale, want, along)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), along
    turned = dispatch.twin(turn, rows)(got, rows)
    assert turned.is_contiguous() and torch.equal(turned.view(torch.uint8), got.view(torch.uint8).t())


@pytest.mark.parametrize(("rows", "columns"), [(36, 40), (260, 9), (24, 300)])
@pytest.mark.parametrize("both", [False, True])
def test_casts_by_a_given_amax_have_the_bits_of_the_reference(rows: int, columns: int, both: bool) -> None:
    x = seeded(rows, columns, dtype=torch.bfloat16)
    x[0, 0], x[3] = 0.0, 0.0
    measured = dispatch.twin(largest_magnitudes, x)(x, both)
    assert torch.equal(measured, largest_magnitudes(x, both)) and measured.shape == (columns + rows * both,)
    odd = x.clone()
    odd[-1, -1], odd[0, 7] = float("inf"), float("nan")
    assert torch.equal(dispatch.twin(largest_magnitudes, odd)(odd, both), largest_magnitudes(odd, both))
    amax = measured * 3.0  # as if other ranks had larger values
    for got, want in zip(dispatch.twin(cast_turned, x)(x, amax, both), cast_turned(x, amax, both), strict=True):
        assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_scales_are_those_of_the_reference_next_to_every_power_of_two(stride: int) -> None:
    powers = torch.arange(-126, 128, stride, device=DEVICE).float().exp2()  # 23 divides 253: both ends are there
    near = torch.tensor([0x3FDFFFFF, 0x3FE00000, 0x3FE00001, 0x3F800000, 0x3FFFFFFF], dtype=torch.int32, device=DEVICE)
    x = (powers[:, None] * near.view(torch.float32)).flatten()[:, None]  # 1.75 is where the exponent changes
    got = K.to_fp8(x, rows=True)
    with K.use("reference"):
        want = K.to_fp8(x, rows=True)
    assert torch.equal(got.inverse, want.inverse) and torch.equal(got.values.float(), want.values.float())


@pytest.mark.parametrize("shape", [(5, 32), pytest.param((70, 9), marks=pytest.mark.slow), (3, 9), (2, 4200)], ids=str)
def test_operands_written_with_a_result_have_the_bits_of_its_cast(shape: tuple[int, int]) -> None:
    x, other = seeded(*shape, dtype=torch.bfloat16), seeded(*shape, dtype=torch.bfloat16, seed=1)
    x[0, 0], x[-1, -1] = 3e4, 0.0
    w, b = (seeded(shape[1], dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
    for residual, bias, centred in product((None, other), (None, b), (False, True)):
        if bias is None or centred:
            made = dispatch.twin(whole_and_cast, x)(x, residual, w, bias, 1e-5, centred)
            plain = dispatch.twin(whole, x)(x, residual, w, bias, 1e-5, centred)
            same_cast(made[0], plain[0], made[4:])
    for kind in ("silu", "gelu tanh"):
        result = dispatch.twin(gated_and_cast, x)(x, other, kind)
        same_cast(result[0], dispatch.twin(gated, x)(x, other, kind), result[1:])


def same_cast(y: Tensor, want: Tensor, cast: tuple[Tensor, ...]) -> None:
    assert torch.equal(y, want)
    values, inverse = cast_rows(y)
    assert torch.equal(cast[0].view(torch.uint8), values.view(torch.uint8)) and torch.equal(cast[1], inverse)


# Triton's interpreter takes seconds for several blocks of keys: once with a bias, once without.
_BLOCKS_OF_KEYS = [(37, 70, 8, False), (64, 33, 32, True)]


@pytest.mark.parametrize(
    ("queries", "keys", "d", "biased"),
    [
        pytest.param(*shape, biased, marks=pytest.mark.slow if (*shape, biased) in _BLOCKS_OF_KEYS else ())
        for shape in [(37, 70, 8), (1, 3, 5), (64, 33, 32)]
        for biased in (True, False)
    ],
)
@dtypes
def test_pair_attention(queries: int, keys: int, d: int, biased: bool, dtype: torch.dtype) -> None:
    """Views, masks, and a row in which no key counts; in half precision weights are rounded before each product."""
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16; float16 takes the same way")
    b, r, h = (1, 2, 2) if INTERPRETED and keys > 32 else (2, 3, 2)  # each head is a program, of seconds there
    q, dout = (seeded(b, r, queries, h, d, dtype=dtype, seed=i) for i in (0, 9))
    k, v = seeded(b, r, keys, h, 2 * d, dtype=dtype, seed=1).chunk(2, -1)
    bias = seeded(b, queries, keys, h, dtype=dtype, seed=2).permute(0, 3, 1, 2) if biased else None
    key_bias = torch.zeros(b, r, keys, device=DEVICE).masked_fill_(seeded(b, r, keys, seed=3) > 0.8, -torch.inf)
    key_bias[-1, -1] = -torch.inf
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *([bias] if biased else []))]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got = K.pair_attention(*leaves, key_bias=key_bias)
    with K.use("reference"):
        wanted = K.pair_attention(*exact, key_bias=key_bias.double())
    assert not got[-1, -1].any()
    gradients = torch.autograd.grad(got, leaves, dout)
    wanted_gradients = torch.autograd.grad(wanted, exact, dout.double())
    allowed = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for i, (x, y) in enumerate(zip((got, *gradients), (wanted, *wanted_gradients), strict=True)):
        assert x.dtype is dtype
        off = float((x.double() - y).detach().abs().max() / max(1.0, float(y.detach().abs().max())))
        assert off <= allowed, f"{i}: {off}"


@shapes_and_dtypes
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = seeded(*shape, dtype=dtype)
    w, b = seeded(shape[-1], dtype=dtype, seed=2), seeded(shape[-1], dtype=dtype, seed=3)
    rows = float(x.numel() // shape[-1])
    agree(lambda x, w: K.rms_norm(x, w, 1e-2), x, w, scale=rows)
    agree(lambda x: K.rms_norm(x, None, 1e-2), x)
    agree(lambda x, w, b: K.layer_norm(x, w, b, 1e-2), x, w, b, scale=rows)


def test_sums_of_weight_gradients_over_many_programs() -> None:
    from meshfold.kernels._triton import launch
    from meshfold.kernels.norm_passes_triton import sum_parts

    parts = seeded(2, 300, 40, dtype=torch.float32)
    found = torch.full((2, 40), torch.nan, dtype=torch.float32, device=DEVICE)
    launch(sum_parts, (2, 2), parts, parts, found, 300, 40, HIGH=128, WIDE=32, num_warps=8)
    torch.testing.assert_close(found, parts.double().sum(1).float())


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@dtypes
def test_fused_residual_add_is_the_two_steps(dtype: torch.dtype, stream: torch.dtype) -> None:
    x, r = seeded(6, 40, dtype=dtype), seeded(6, 40, dtype=stream, seed=1)
    w, b = seeded(40, dtype=dtype, seed=2), seeded(40, dtype=dtype, seed=3)
    y, summed = K.add_rms_norm(x, r, w)
    assert (y.dtype, summed.dtype) == (dtype, stream)
    near(summed, x.double() + r.double(), "sum")
    with K.use("reference"):
        near(y, K.rms_norm(summed.double(), w.double()), "rms")
    y, summed = K.add_layer_norm(x, r, w, b)
    with K.use("reference"):
        near(y, K.layer_norm(summed.double(), w.double(), b.double()), "layer")
    # Gradients as functions of the sum that was stored.
    zero = torch.zeros_like(r)
    leaves = (summed.detach().requires_grad_(), w.detach().requires_grad_(), b.detach().requires_grad_())
    exact = tuple(t.detach().double().requires_grad_() for t in leaves)
    outputs = K.add_layer_norm(zero.to(dtype), *leaves)
    with K.use("reference"):
        wanted = K.add_layer_norm(zero.double(), *exact)
    towards = [seeded(6, 40, dtype=t.dtype, seed=7 + i) for i, t in enumerate(outputs)]
    got = torch.autograd.grad(outputs, leaves, towards)
    for g, e in zip(got, torch.autograd.grad(wanted, exact, [t.double() for t in towards]), strict=True):
        near(g, e, "gradient", 6.0)


@dtypes
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=st.integers(1, 70),
    cuts=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_norm_pieces(dtype: torch.dtype, rows: int, cuts: list[int], seed: int) -> None:
    """The pieces over slices of a row (strided, so never contiguous), against the whole row in float64. LayerNorm: equal ones."""
    pieces_of_rms_norm(dtype, rows, cuts, seed)
    pieces_of_layer_norm(dtype, rows, [cuts[0]] * len(cuts), seed)


def pieces_of_rms_norm(dtype: torch.dtype, rows: int, cuts: list[int], seed: int) -> None:
    with K.use("triton"):
        hidden = sum(cuts)
        x, dy = seeded(rows, hidden, dtype=dtype, seed=seed), seeded(rows, hidden, dtype=dtype, seed=seed + 1)
        w = seeded(hidden, dtype=dtype, seed=seed + 2)
        parts = list(zip(dy.split(cuts, -1), x.split(cuts, -1), w.split(cuts), strict=True))
        square = torch.stack([K.rms_norm_stats(p) for _, p, _ in parts]).sum(0)
        rstd = torch.rsqrt(square / hidden + 1e-2)
        sums = torch.stack([K.rms_norm_backward_stats(*p, rstd) for p in parts]).sum(0)
        back = [K.rms_norm_backward_apply(*p, rstd, sums, hidden) for p in parts]
        got = [
            torch.cat([K.rms_norm_apply(p, g, rstd) for _, p, g in parts], -1),
            *(torch.cat(list(kind), -1) for kind in zip(*back, strict=True)),
        ]
    x, w = (t.double().requires_grad_() for t in (x, w))
    with K.use("reference"):
        y = K.rms_norm(x, w, 1e-2)
        wanted = [y, *torch.autograd.grad(y, (x, w), dy.double())]
    for name, g, e in zip(("rms y", "rms dx", "rms dw"), got, wanted, strict=True):
        near(g, e, name, float(rows))


def pieces_of_layer_norm(dtype: torch.dtype, rows: int, cuts: list[int], seed: int) -> None:
    with K.use("triton"):
        hidden = sum(cuts)
        x, dy = seeded(rows, hidden, dtype=dtype, seed=seed), seeded(rows, hidden, dtype=dtype, seed=seed + 1)
        w, b = seeded(hidden, dtype=dtype, seed=seed + 2), seeded(hidden, dtype=dtype, seed=seed + 3)
        parts = list(zip(dy.split(cuts, -1), x.split(cuts, -1), w.split(cuts), strict=True))
        mean, rstd = K.layer_norm_joined(torch.stack([K.layer_norm_stats(p) for _, p, _ in parts]), 1e-2)
        sums = torch.stack([K.layer_norm_backward_stats(*p, mean, rstd) for p in parts]).sum(0)
        back = [K.layer_norm_backward_apply(*p, mean, rstd, sums, hidden) for p in parts]
        biases = b.split(cuts)
        got = [
            torch.cat(
                [K.layer_norm_apply(p[1], p[2], c, mean, rstd) for p, c in zip(parts, biases, strict=True)],
                -1,
            ),
            *(torch.cat(list(kind), -1) for kind in zip(*back, strict=True)),
        ]
    x, w, b = (t.double().requires_grad_() for t in (x, w, b))
    with K.use("reference"):
        y = K.layer_norm(x, w, b, 1e-2)
        wanted = [y, *torch.autograd.grad(y, (x, w, b), dy.double())]
    for name, g, e in zip(("layer y", "layer dx", "layer dw", "layer db"), got, wanted, strict=True):
        near(g, e, name, float(rows))


@shapes_and_dtypes
def test_activations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = seeded(*shape, dtype=dtype, scale=3), seeded(*shape, dtype=dtype, seed=1, scale=3)
    agree(K.swiglu, torch.cat((gate, up), -1))
    agree(K.swiglu2, gate, up)
    flat = torch.cat((gate, up), -1).flatten(0, -2)
    agree(K.weighted_swiglu, flat, seeded(flat.shape[0], seed=3), scale=3.0 * shape[-1])
    filled = torch.tensor([flat.shape[0]], dtype=torch.int32, device=DEVICE)

    def with_rows_of_nobody(x: Tensor, weights: Tensor) -> Tensor:
        more, others = (
            torch.full_like(x[:1], torch.nan).expand(5, -1),
            torch.full_like(weights[:1], torch.nan).expand(5),
        )
        return K.weighted_swiglu(torch.cat([x, more]), torch.cat([weights, others]), filled)[: len(x)]

    agree(with_rows_of_nobody, flat, seeded(flat.shape[0], seed=3), scale=3.0 * shape[-1])
    for approximate in ("none", "tanh"):
        agree(lambda a, b, how=approximate: K.geglu2(a, b, how), gate, up)


@dtypes
def test_activations_of_slices(dtype: torch.dtype) -> None:
    wide = seeded(12, 70, dtype=dtype, scale=3)
    agree(K.swiglu2, wide[::2, :30], wide[::2, 40:])
    agree(K.swiglu, wide[:, 2:52])


ROTARY = [(2, 3, 4, 2, 16, 0), (1, 1, 1, 1, 2, 0), (2, 5, 3, 1, 6, 3), (1, 4, 40, 8, 128, 0)]


@with_dtypes("dims", ROTARY)
def test_rotary(dims: tuple[int, ...], dtype: torch.dtype) -> None:
    b, s, heads, kv_heads, r, rest = dims
    cos, sin = seeded(s, r, seed=8), seeded(b, s, r, seed=9)
    fused = seeded(b, s, heads + 2 * kv_heads, r + rest, dtype=dtype)
    q, k = fused[:, :, :heads], fused[:, :, heads : heads + kv_heads]
    cos = cos.expand(b, s, r)

    def rotary(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        tables = (cos.double(), sin.double()) if q.dtype is torch.float64 else (cos, sin)
        return K.apply_rotary(q, k, *tables)

    agree(rotary, q, k)


MERGES = [(2, 5, 3, 16), (1, 1, 1, 1), (1, 7, 4, 100), (2, 3, 8, 128)]


@with_dtypes("dims", MERGES)
def test_merge_of_partial_attention(dims: tuple[int, ...], dtype: torch.dtype) -> None:
    """Strided views on both sides, rows that have seen no key on one side or on both."""
    b, s, heads, d = dims
    out, part = (
        seeded(b, 2 * s, heads, d)[:, ::2],
        seeded(b, heads, s, d, dtype=dtype, seed=1).transpose(1, 2),
    )
    lse, part_lse = seeded(b, heads, 2 * s, seed=2, scale=3)[..., s:], seeded(b, s, heads, seed=3, scale=3).mT
    lse[..., 0], part_lse[..., -1] = -torch.inf, -torch.inf
    out[:, 0] = 0.0
    exact_out, exact_lse = out.double(), lse.double()
    with K.use("reference"):
        K.merge_attention_(exact_out, exact_lse, part.double(), part_lse.double())
    K.merge_attention_(out, lse, part, part_lse)
    seen = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    near(lse[seen], exact_lse[seen], "log-sum-exp", 10.0)
    near(out, exact_out, "output", 4.0)


@with_dtypes("sizes", [(9, 3, 23, 12), (1, 1, 1, 1), (40, 2, 80, 5), (3, 4, 12, 1030)])
def test_token_rows(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Pairs without a row and rows without a pair; rows that are part of wider ones."""
    tokens, each, rows, hidden = sizes
    generator = torch.Generator().manual_seed(rows)
    number = max(1, min(rows, tokens * each) - 2)
    places = torch.full((tokens * each,), -1)
    slots, targets = (torch.randperm(n, generator=generator)[:number] for n in (tokens * each, rows))
    places = places.scatter(0, slots, targets).view(tokens, each).to(DEVICE)
    pairs = torch.zeros(rows, dtype=torch.int64).scatter(0, targets, slots).to(DEVICE)
    x = seeded(tokens, 2 * hidden, dtype=dtype)[:, :hidden]
    agree(lambda x: K.take_rows(x, pairs, places)[targets], x, scale=each)
    given = seeded(tokens, each, seed=3)
    agree(lambda x, w: [y[targets] for y in K.take_weighted_rows(x, w, pairs, places)], x, given, scale=each)
    summands = seeded(rows, 2 * hidden, dtype=dtype, seed=1)[:, hidden:]
    weights = seeded(tokens, each, seed=2)
    named = targets.to(DEVICE)  # the gradients of others are undefined without weights
    whole = torch.zeros(rows, hidden, device=DEVICE)
    agree(lambda r: K.sum_rows(whole.to(r).index_copy(0, named, r), pairs, places), summands[named], scale=each)
    agree(lambda r, w: K.sum_rows(r, pairs, places, w), summands, weights, scale=hidden**0.5)
    before = seeded(tokens, hidden, dtype=dtype, seed=4)
    for given in (None, weights):
        found, exact = before.clone(), before.double()
        K.add_rows_(found, summands, pairs, places, given)
        with K.use("reference"):
            K.add_rows_(exact, summands.double(), pairs, places, None if given is None else given.double())
        near(found, exact, "rows added in place", each + 1.0)


def totals_of(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    shares = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(1)
    _, sums, squares = K.routing_totals(logits, shares, index)
    return sums, squares.unsqueeze(0)


_MANY = [pytest.param(*shape, marks=pytest.mark.slow) for shape in ((5, 4, 1), (70, 6, 3), (3, 130, 8))]


@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 4, 2), (5, 6, 3), *_MANY])
def test_expert_choice(tokens: int, experts: int, k: int) -> None:
    for dtype, normalize in ((torch.float32, True), (torch.bfloat16, False)):
        # Multiples of 1/8, all different in a row: every order is exact in bfloat16.
        order = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).argsort(1)
        logits = (order / 8 - experts / 16).to(DEVICE, dtype)
        with K.use("reference"):
            wanted = K.softmax_choice(logits, k, normalize)[0]
        assert torch.equal(K.softmax_choice(logits, k, normalize)[0], wanted)
        agree(lambda z, n=normalize: K.softmax_choice(z, k, n)[1:], logits, scale=4)
        agree(lambda z, n=normalize: K.softmax_choice(z, k, n)[1], logits, scale=4)
        counts = torch.bincount(wanted.flatten(), minlength=experts)
        found = K.routing_totals(logits, logits.float().softmax(1), wanted)
        assert torch.equal(found[0].long(), counts)
        # Not of bfloat16: gradients of both sums would be rounded before they are added up.
        agree(lambda z, i=wanted: totals_of(z, i), logits.float(), scale=(tokens + 1) * 16)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(300, 6, 3), *_MANY])
def test_expert_places(tokens: int, experts: int, k: int) -> None:
    """Numbers of no expert, tokens that name an expert twice, an expert without tokens, and more rows than pairs."""
    index = torch.randint(-1, experts + 1, (tokens, k), generator=torch.Generator().manual_seed(tokens))
    index[index == 1] = 2
    index[0, 0] = (1 << 32) + 2
    for numbers, rows in ((index, None), (index.clamp(-1, experts).int().t().contiguous().t(), tokens * k + 3)):
        found = K.expert_places(numbers.to(DEVICE), experts, rows)
        with K.use("reference"):
            wanted = K.expert_places(numbers.to(DEVICE), experts, rows)
        assert all(
            torch.equal(one, other) and one.dtype is other.dtype for one, other in zip(found, wanted, strict=True)
        )


@pytest.mark.parametrize("dtype", (torch.float16,) if INTERPRETED else (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    ("counts", "inner", "columns"),
    [
        ((130, 0, 300, 1, 209), 128, 320),  # experts without rows, with one row; runs of less, one and several tiles
        ((512,), 64, 8),
        pytest.param((0, 0, 600, 0, 168), 192, 264, marks=pytest.mark.slow),
    ],
)
def test_grouped_product(dtype: torch.dtype, counts: tuple[int, ...], inner: int, columns: int) -> None:
    """Rows times matrices in both memory layouts. Rows of no expert may be NaN and change nothing."""
    from meshfold.kernels import grouped_products_triton as triton_twin

    many = sum(counts)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
    rows = seeded(many + 7, inner, dtype=dtype)
    rows[many:] = torch.nan
    matrices = seeded(len(counts), inner, columns, dtype=dtype, seed=1)
    launched: list[object] = []
    times = triton_twin._times
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_twin, "_times", lambda *arguments: (launched.append(0), times(*arguments))[1])
        for right in (matrices, matrices.transpose(1, 2).contiguous().transpose(1, 2)):
            got = K.grouped_product(rows, right, ends)
            exact = K.grouped_product(rows.double(), right.double(), ends, counts)  # not in Triton: float64
            near(got[:many], exact[:many], "products")
    assert len(launched) == (2 if INTERPRETED or torch.cuda.get_device_capability()[0] == 9 else 0)


# A row is a program of its own: more rows than a few are only slower.
FEW_ROWS = [(7, 5) if shape == (70, 5) else shape for shape in SHAPES]


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-2)])
@with_dtypes("shape", FEW_ROWS)
def test_cross_entropy(shape: tuple[int, ...], dtype: torch.dtype, smoothing: float, z_loss: float) -> None:
    logits = seeded(*shape, dtype=dtype, scale=3)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    labels[..., 0] = -100
    for inplace in (False, True):
        agree(
            lambda z, inplace=inplace: K.cross_entropy(z * 1, labels, -100, smoothing, z_loss, inplace),
            logits,
        )


@dtypes
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=st.integers(1, 6),
    cuts=st.lists(st.integers(0, 300), min_size=1, max_size=3).filter(lambda cuts: sum(cuts) > 1),
    extra=st.integers(0, 3),
    inplace=st.booleans(),
)
def test_cross_entropy_pieces(dtype: torch.dtype, rows: int, cuts: list[int], extra: int, inplace: bool) -> None:
    """Shards with padding columns full of rubbish, empty shards among them."""
    smoothing, z_loss, vocabulary = 0.1, 1e-2, sum(cuts)
    logits = seeded(rows, vocabulary, dtype=dtype, scale=3)
    labels = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grad = seeded(rows, seed=2)
    leaf = logits.double().requires_grad_()
    with K.use("reference"):
        wanted = K.cross_entropy(leaf, labels, -100, smoothing, z_loss)
        (back,) = torch.autograd.grad(wanted, leaf, grad.double())
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    parts = [
        (start, valid, torch.cat((logits[:, start : start + valid], logits.new_full((rows, extra), 1e4)), -1))
        for start, valid in zip(starts, cuts, strict=True)
    ]
    with K.use("triton"):
        row_max = torch.stack([K.local_max(z, valid) for _, valid, z in parts]).amax(0)
        sums = torch.stack(
            [K.sum_exp_and_target(z, row_max, labels, start, valid, True) for start, valid, z in parts]
        ).sum(0)
        assert torch.equal(row_max, logits.float().amax(-1))
        near(K.loss_per_row(row_max, sums, smoothing, z_loss, vocabulary), wanted, "loss")
        got = [
            K.cross_entropy_backward(
                z, row_max, sums[0], labels, start, grad, smoothing, z_loss, vocabulary, valid, inplace
            )
            for start, valid, z in parts
        ]
    for d, (_, valid, z) in zip(got, parts, strict=True):
        assert (d is z) is inplace and (d[:, valid:] == 0).all()
    near(torch.cat([d[:, :valid] for d, (_, valid, _) in zip(got, parts, strict=True)], -1), back, "dlogits")


HEADS: list[dict[str, object]] = [
    {},
    dict(softcap=2.0, scale=0.7, label_smoothing=0.1, z_loss=1e-2),
    dict(recompute=True),
    dict(softcap=2.0, recompute=True),
]


@pytest.mark.parametrize("given_", HEADS, ids=str)
@pytest.mark.parametrize("words", [37, 1100])
@dtypes
def test_linear_cross_entropy(dtype: torch.dtype, words: int, given_: dict[str, Any]) -> None:
    """Chunks of two sizes, rows that do not count, and a factor in the backward."""
    x, weight = seeded(5, 8, dtype=dtype), seeded(words, 8, dtype=dtype, seed=1)
    labels = torch.tensor([3, -100, words - 1, 0, 3], device=DEVICE)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return K.linear_cross_entropy(x, weight, labels, chunk=3, **given_) * 3.0

    exact = tuple(t.double().requires_grad_() for t in (x, weight))
    got_leaves = tuple(t.detach().requires_grad_() for t in (x, weight))
    with K.use("reference"):
        wanted = loss(*exact)
        back = torch.autograd.grad(wanted, exact)
    got = loss(*got_leaves)
    # The matmuls round logits and their gradient to the dtype, as a linear layer does.
    rounding = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert abs(got.item() - wanted.item()) <= rounding * wanted.item()
    for g, e in zip(torch.autograd.grad(got, got_leaves), back, strict=True):
        assert float((g.double() - e).norm()) <= rounding * float(e.norm())


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("words", [37, 1100])
def test_linear_log_probs(words: int, softcap: float) -> None:
    x, weight = seeded(5, 8), seeded(words, 8, seed=1)
    labels = torch.tensor([3, -100, words - 1, 0, 3], device=DEVICE)
    agree(
        lambda x, weight: tuple(  # type: ignore[arg-type]
            K.linear_log_probs(x, weight, labels, chunk=3, softcap=softcap, scale=0.9, entropy=True)
        ),
        x,
        weight,
        scale=10.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    p=st.floats(0.05, 1.0),
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
    key=st.integers(-(1 << 63), (1 << 63) - 1),
    row=st.one_of(st.integers(0, 50), st.integers(0, 1 << 40)),
    col=st.integers(0, 100),
    listed=st.booleans(),
    strided=st.booleans(),
)
def test_dropout_drops_what_the_reference_drops(
    dtype: torch.dtype,
    rows: int,
    columns: int,
    p: float,
    seed: int,
    key: int,
    row: int,
    col: int,
    listed: bool,
    strided: bool,
) -> None:
    """Bit for bit, values and gradients."""
    x = seeded(rows, 2 * columns, dtype=dtype)[:, :columns] if strided else seeded(rows, columns, dtype=dtype)
    place: int | Tensor = torch.arange(row, row + 3 * rows, 3, device=DEVICE) if listed else row
    dy = seeded(rows, columns, dtype=dtype, seed=1)
    results = []
    for implementation in ("triton", "reference"):
        with K.use(implementation):
            leaf = x.detach().requires_grad_()
            y = K.dropout(leaf, p, seed, key, place, col, col + columns + 1)
            results.append((y, *torch.autograd.grad(y, leaf, dy)))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
    with K.use("triton"):
        held = torch.tensor(key, device=DEVICE)
        assert torch.equal(K.dropout(x, p, seed, held, place, col, col + columns + 1), results[0][0])


def test_dropout_in_bfloat16_keeps_the_same_elements() -> None:
    x = seeded(30, 50, dtype=torch.bfloat16)
    y = K.dropout(x, 0.5, 1, 2)
    with K.use("reference"):
        wanted = K.dropout(x, 0.5, 1, 2)
    assert torch.equal(y == 0, wanted == 0)
    near(y, x.double() * 2 * (wanted != 0), "dropout")


def test_rows_without_work() -> None:
    empty = torch.empty(0, 8, device=DEVICE, requires_grad=True)
    w = torch.ones(8, device=DEVICE, requires_grad=True)
    for y in (
        K.rms_norm(empty, w),
        K.layer_norm(empty, w, w),
        K.dropout(empty, 0.5, 1, 2),
    ):
        assert y.shape == (0, 8)
    assert torch.equal(torch.autograd.grad(K.rms_norm(empty, w).sum(), w)[0], torch.zeros_like(w))


def test_float64_and_very_wide_rows_take_the_reference() -> None:
    with pytest.raises(K.KernelError, match=r"take no torch\.float64"):
        K.rms_norm(seeded(2, 4, dtype=torch.float64), None)
    wide = seeded(1, 65537)
    agree(lambda x: K.rms_norm(x, None), wide)


on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU: memory and speed beyond Triton's interpreter")


@on_a_gpu
def test_more_than_two_to_the_31_elements() -> None:
    """Addresses need 64 bits: the last rows come out as they do alone."""
    rows, columns = (1 << 16) + 8, 1 << 15
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    labels = torch.randint(0, columns, (rows,), device=DEVICE)
    last = x[-8:].clone()
    m, m_last = K.local_max(x), K.local_max(last)
    sums = K.sum_exp_and_target(x, m, labels, 0, logit_sum=True)
    sums_last = K.sum_exp_and_target(last, m_last, labels[-8:], 0, logit_sum=True)
    assert torch.equal(m[-8:], m_last) and torch.equal(sums[:, -8:], sums_last)
    grad = torch.ones(rows, device=DEVICE)
    whole = K.cross_entropy_backward(x, m, sums[0], labels, 0, grad, 0.1, 0.0, columns)
    alone = K.cross_entropy_backward(last, m_last, sums_last[0], labels[-8:], 0, grad[-8:], 0.1, 0.0, columns)
    assert torch.equal(whole[-8:], alone)
    del whole
    w = torch.ones(columns, dtype=torch.bfloat16, device=DEVICE)
    for op in (
        lambda t, first: K.rms_norm(t, w),
        lambda t, first: K.layer_norm(t, w, w),
        lambda t, first: K.swiglu(t),
        lambda t, first: K.dropout(t, 0.5, 1, 2, first),
    ):
        assert torch.equal(op(x, 0)[-8:], op(last, rows - 8))


@on_a_gpu
def test_compiled_dropout_drops_the_same_elements() -> None:
    """Inductor's Triton and ours, for element numbers beyond 32 bits."""
    x = seeded(64, 96)
    compiled = torch.compile(lambda t, seed, row: K.dropout(t, 0.3, seed, 5, row, 7, 103), fullgraph=True)
    for seed, row in ((1, 0), (2, 1 << 40), (-9, (1 << 31) - 3)):
        assert torch.equal(compiled(x, seed, row), K.dropout(x, 0.3, seed, 5, row, 7, 103))


@on_a_gpu
@dtypes
def test_compiled_kernels_are_as_exact(dtype: torch.dtype) -> None:
    x, w = seeded(64, 512, dtype=dtype), seeded(512, dtype=dtype, seed=1)
    agree(torch.compile(lambda x, w: K.rms_norm(x, w), fullgraph=True), x, w, scale=64.0)
    agree(torch.compile(lambda x: K.swiglu(x), fullgraph=True), x)
