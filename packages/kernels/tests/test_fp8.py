"""Matmuls in fp8: equal to the float64 product of what the rounded operands stand for, and the same for blocks of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.kernels import (
    FP8_RECIPES,
    Fp8Recipe,
    bind_fp8_matmul,
    dispatch,
    fp8,
    fp8_cast_weight,
    fp8_casts,
    fp8_gain,
    fp8_input_gradient,
    fp8_output,
    fp8_product,
    fp8_weight_gradient,
    to_fp8,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw(rows: int, columns: int, seed: int, size: float = 1.0) -> Tensor:
    """Rows of unlike sizes, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-2, 2, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * spread * size).bfloat16()


def exact(a: Tensor, b: Tensor, recipe: Fp8Recipe, dtype: torch.dtype = E4M3, high: int = 1) -> Tensor:
    """The product ``a bᵀ`` in float64 of the rounded operands, from the definition of the cast; ``high``: of a tile of b."""

    def rounded(x: Tensor, fmt: torch.dtype, high: int = 1) -> Tensor:
        if recipe.block:  # tile by tile
            made = x.double().clone()
            for row in range(0, x.shape[0], high):
                for column in range(0, x.shape[1], 128):
                    tile = made[row : row + high, column : column + 128]
                    scale = 2.0 ** math.floor(math.log2(torch.finfo(fmt).max / float(tile.abs().max())))
                    tile.copy_((tile.float() * scale).to(fmt).double() / scale)
            return made
        amax = x.double().abs().amax(1, keepdim=True) if recipe.rows else x.double().abs().amax()
        scale = (torch.finfo(fmt).max / amax).float()
        if recipe.rows:
            scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
        return (x.float() * scale).to(fmt).double() / scale.double()

    return rounded(a, dtype) @ rounded(b, E4M3, high).t()


@pytest.mark.parametrize("recipe", FP8_RECIPES.values(), ids=list(FP8_RECIPES))
@pytest.mark.parametrize("tokens", [32, 37])
def test_products_equal_float64_products_of_rounded_operands(recipe: Fp8Recipe, tokens: int) -> None:
    n, k = (384, 256) if recipe.block else (48, 64)
    x, w, dy = draw(tokens, k, 0), draw(n, k, 1), draw(tokens, n, 2, 1e-6)
    found = {
        "y": (fp8_output(x, w, recipe), exact(x, w, recipe, high=128)),
        "dx": (fp8_input_gradient(dy, w, recipe), exact(dy, w.t(), recipe, recipe.gradient, high=128)),
        "dw": (
            fp8_weight_gradient(dy, x, recipe),
            exact(dy.t(), x.t(), recipe, recipe.gradient) if recipe.weight_gradient else dy.double().t() @ x.double(),
        ),
    }
    for name, (ours, wanted) in found.items():
        assert ours.dtype is torch.bfloat16
        # one rounding to bf16, and float32 sums
        torch.testing.assert_close(
            ours.double(), wanted, rtol=2**-8, atol=float(wanted.abs().max()) * 1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("recipe", FP8_RECIPES.values(), ids=list(FP8_RECIPES))
def test_autograd_gives_the_three_products(recipe: Fp8Recipe) -> None:
    n, k = recipe.multiple, 2 * recipe.multiple
    x = draw(6 * 4, k, 0).view(6, 4, k).requires_grad_()
    w = draw(n, k, 1).requires_grad_()
    dy = draw(24, n, 2).view(6, 4, n)
    y = bind_fp8_matmul(recipe)(x, w)
    y.backward(dy)
    assert x.grad is not None and w.grad is not None
    flat, dy = x.detach().view(24, k), dy.view(24, n)
    assert torch.equal(y.view(24, n), fp8_output(flat, w.detach(), recipe))
    assert torch.equal(x.grad.view(24, k), fp8_input_gradient(dy, w.detach(), recipe))
    assert torch.equal(w.grad, fp8_weight_gradient(dy, flat, recipe))


def test_cast_uses_the_whole_range_and_saturates() -> None:
    x = torch.tensor([[1.0, -3.0, 0.5], [448.0, 7.0, -447.9]])
    rows = to_fp8(x, rows=True)
    assert rows.inverse.flatten().tolist() == [2.0**-7, 1.0]  # 128 * 3 is at most 448
    assert torch.equal(rows.dequantize()[0], x[0])
    whole = to_fp8(x.double() * 1e20, rows=False, dtype=E5M2)
    assert whole.values.dtype is E5M2 and whole.values.float().abs().max() == torch.finfo(E5M2).max
    smaller = to_fp8(x, rows=False, maximum=lambda amax: amax / 4)  # as if too small an amax were known
    assert smaller.values.float().abs().max() == torch.finfo(E4M3).max
    assert smaller.values.float().isfinite().all()


@pytest.mark.parametrize("rows", [True, False])
def test_zeros_stay_zeros(rows: bool) -> None:
    x, w = torch.zeros(16, 32, dtype=torch.bfloat16), draw(16, 32, 0)
    assert torch.equal(to_fp8(x, rows=rows).values.float(), torch.zeros(16, 32))
    y = fp8_product(to_fp8(x, rows=rows), to_fp8(w, rows=rows))
    assert torch.equal(y, torch.zeros(16, 16, dtype=torch.bfloat16))
    mixed = w.clone()
    mixed[3] = 0
    assert torch.equal(to_fp8(mixed, rows=rows).dequantize()[3], torch.zeros(32))


def test_small_rows_do_not_underflow_beside_large_ones() -> None:
    x = torch.ones(2, 16)
    x[0] *= 1e-20
    assert torch.allclose(to_fp8(x, rows=True).dequantize()[0], x[0], rtol=2**-4, atol=0)
    assert torch.equal(to_fp8(x, rows=False).dequantize()[0], torch.zeros(16))  # one scale: it underflows
    tiny = to_fp8(torch.full((1, 16), 1e-38), rows=True)  # below the least amax: rounded to zero, not to nan
    assert torch.equal(tiny.dequantize(), torch.zeros(1, 16))


def test_tiles_are_rounded_apart_and_a_bad_one_is_nan() -> None:
    x, w = draw(256, 384, 0), draw(128, 384, 1)
    x[:, 128:256] *= 1e-6
    for high in (1, 128):
        made = to_fp8(x, rows=True, tile=(high, 128))
        assert made.inverse.shape == (256 // high, 3)
        assert torch.equal(made.inverse, torch.exp2(made.inverse.log2().round()))
        assert float((made.dequantize() / x.float() - 1).abs().nan_to_num().median()) < 2**-4
        for part, name in ((x[:128], "rows"), (x[:, 256:], "columns")):  # blocks of whole tiles are blocks of the whole
            got = to_fp8(part, rows=True, tile=(high, 128)).values.view(torch.uint8)
            want = made.values.view(torch.uint8)
            assert torch.equal(got, want[:128] if name == "rows" else want[:, 256:])
    x[3, 200] = torch.inf
    y = fp8_output(x, w, FP8_RECIPES["block128"])
    assert y[3].isnan().all() and y[4:].isfinite().all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_row_with_nan_or_infinity_becomes_nan(wrong: float, reduced: bool) -> None:
    x, w = draw(16, 32, 0), draw(16, 32, 1)
    x[5, 7] = wrong
    maximum = (lambda amax: torch.fmax(amax, torch.zeros(()))) if reduced else None  # fmax leaves nan out, as NCCL may
    by_row = to_fp8(x, rows=True, maximum=maximum)
    y = fp8_product(by_row, to_fp8(w, rows=True))
    assert y[5].isnan().all()
    assert y[[*range(5), *range(6, 16)]].isfinite().all()
    whole = fp8_product(to_fp8(x, rows=False, maximum=maximum), to_fp8(w, rows=False))
    assert whole.isnan().all()


@pytest.mark.parametrize("rows", [True, False])
def test_blocks_with_the_largest_amax_are_those_of_the_whole(rows: bool) -> None:
    whole = draw(16, 64, 3)
    want = to_fp8(whole, rows=rows)
    halves = whole.chunk(2, dim=1)
    amax = [(half.abs().amax(1, keepdim=True) if rows else half.abs().amax()).float() for half in halves]
    got = [to_fp8(half, rows=rows, maximum=lambda mine: torch.maximum(*amax)) for half in halves]
    assert torch.equal(torch.cat([each.values.view(torch.uint8) for each in got], 1), want.values.view(torch.uint8))
    assert all(torch.equal(each.inverse, want.inverse) for each in got)
    if not rows:
        alone = to_fp8(halves[0][:8], rows=rows)
        assert not torch.equal(alone.values.view(torch.uint8), want.values[:8, :32].view(torch.uint8))


@pytest.mark.parametrize("recipe", FP8_RECIPES.values(), ids=list(FP8_RECIPES))
def test_no_tokens(recipe: Fp8Recipe) -> None:
    n, k = recipe.multiple, 2 * recipe.multiple
    x, w = torch.zeros(0, k, dtype=torch.bfloat16, requires_grad=True), draw(n, k, 1).requires_grad_()
    bind_fp8_matmul(recipe)(x, w).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, k)
    assert w.grad is not None and torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize(
    ("recipe", "least"), [("rowwise_hp_dw", 245), ("rowwise", 436), ("tensorwise", 545), ("block128", 436)]
)
def test_narrow_layers_lose_by_the_roofline(recipe: str, least: int) -> None:
    """Against the bound by hand, for square layers of twice that width and for long ones; few tokens do not pay for the weights."""
    kind = FP8_RECIPES[recipe]
    assert fp8_gain(2 * least - 6, 2 * least - 6, kind) < 0 < fp8_gain(2 * least + 6, 2 * least + 6, kind)
    assert fp8_gain(least, 2**20, kind) < 0 < fp8_gain(least + 3, 2**20, kind)
    assert fp8_gain(4096, 4096, kind, tokens=256) < 0 < fp8_gain(4096, 4096, kind, tokens=8192)
    assert fp8_gain(4096, 4096, kind, tokens=8192) < fp8_gain(4096, 4096, kind)


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", ["rowwise", "block128"])
def test_compiled_casts_are_equal_to_eager_ones(recipe: str) -> None:
    product, n = bind_fp8_matmul(FP8_RECIPES[recipe]), FP8_RECIPES[recipe].multiple
    x, w = draw(32, 2 * n, 0).requires_grad_(), draw(3 * n, 2 * n, 1).requires_grad_()
    eager = product(x, w)
    torch.compiler.reset()  # else all sizes are symbols in the second graph
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)(x, w)
    assert torch.equal(eager, compiled)
    dy = draw(32, 3 * n, 2)
    for a, b in zip(torch.autograd.grad(eager, (x, w), dy), torch.autograd.grad(compiled, (x, w), dy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("compiled", [False, True])
def test_casts_made_at_once_have_the_same_bits(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = FP8_RECIPES["rowwise"]
    x, w, dy = draw(48, 64, 0), draw(32, 64, 1), draw(48, 32, 2)
    wanted = fp8_output(x, w, recipe), fp8_input_gradient(dy, w, recipe), fp8_weight_gradient(dy, x, recipe)

    calls: list[torch.Size] = []
    if compiled:  # as on a GPU where "triton" is chosen
        monkeypatch.setattr(fp8_casts, "_compiles_kernels", lambda x: torch.compiler.is_compiling())
        monkeypatch.setattr(dispatch, "twin", lambda reference, x: calls.append(x.shape) or reference)
    else:

        def both(x: Tensor) -> tuple[fp8_casts.Cast, fp8_casts.Cast]:
            calls.append(x.shape)
            return fp8_casts.cast_both(x)

        monkeypatch.setattr(fp8, "cast_matrix_both", both)
    product = bind_fp8_matmul(recipe)
    given, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = (torch.compile(product, backend="aot_eager") if compiled else product)(given, weight)
    y.backward(dy)
    for found, want in zip((y, given.grad, weight.grad), wanted, strict=True):
        assert found is not None and torch.equal(found, want)
    assert dy.shape in calls
    casts = [each.dequantize() for each in fp8_cast_weight(w, recipe)]
    assert torch.equal(casts[0], to_fp8(w, rows=True).dequantize())
    assert torch.equal(casts[1], to_fp8(w.t(), rows=True).dequantize())


class LargestOfTwo:
    """The amax over the tokens of two ranks, of which the other has larger values."""

    def __init__(self) -> None:
        self.asked: list[torch.Size] = []

    def reduces(self, dims: tuple[str, ...]) -> bool:
        return "m" in dims

    def __call__(self, amax: Tensor, dims: tuple[str, ...]) -> Tensor:
        self.asked.append(amax.shape)
        return torch.clamp(amax, min=3.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_casts_over_ranks_have_the_same_bits_in_two_readings(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = FP8_RECIPES["rowwise"]
    x, w, dy = draw(48, 64, 0), draw(32, 64, 1), draw(48, 32, 2)
    maximum = LargestOfTwo()
    wanted = fp8_input_gradient(dy, w, recipe, maximum), fp8_weight_gradient(dy, x, recipe, maximum)
    assert maximum.asked == [(32, 1), (64, 1)]  # by the reference
    kernels: list[str] = []

    def twin(reference: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
        kernels.append(reference.__name__)
        return lambda *given: reference(*given)

    monkeypatch.setattr(dispatch, "twin", twin)
    if compiled:  # as on a GPU where "triton" is chosen
        monkeypatch.setattr(fp8_casts, "_compiles_kernels", lambda x: torch.compiler.is_compiling())
    maximum.asked.clear()
    product = bind_fp8_matmul(recipe, maximum)
    given, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    torch.compiler.reset()
    (torch.compile(product, backend="aot_eager") if compiled else product)(given, weight).backward(dy)
    for found, want in zip((given.grad, weight.grad), wanted, strict=True):
        assert found is not None and torch.equal(found, want)
    assert set(maximum.asked) == {(32,), (64,)}
    assert kernels.count("largest_magnitudes") == kernels.count("cast_turned") == 2


def test_compiled_code_on_a_gpu_casts_in_triton_unless_the_reference_is_chosen() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for chosen, wanted in (("auto", True), ("triton", True), ("reference", False)):
        with dispatch.use(chosen):
            assert fp8_casts._in_triton() is wanted
    assert not fp8_casts._compiles_kernels(draw(16, 16, 0))  # not on a CPU, nor in code that is not compiled
