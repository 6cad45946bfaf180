"""Products of one row in Triton against torch: on a GPU, or in Triton's interpreter (``test_triton_interpreter.py``)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.kernels import (
    PackedWeight,
    RowCall,
    RowWeight,
    largest_magnitudes,
    overlapped_launches,
    pack_weight,
    row_product,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("no GPU; test_triton_interpreter.py runs this file in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")
from meshfold.kernels import packed_weight_triton  # noqa: E402  (which needs Triton, as the next ones)
from meshfold.kernels.packed_weight import unpacks_alike  # noqa: E402
from meshfold.kernels.packed_weight_triton import launch_unpack  # noqa: E402
from meshfold.kernels.row_product_triton import product  # noqa: E402
from meshfold.kernels.row_tiles import Tile, measured_row_tiles, take_row_tiles, word_tiles  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SIZES = [(5, 48), (3, 4160), *([] if INTERPRETED else [(2050, 32)])]
FORMS = [
    "float",
    "int8",
    "int8 groups",
    "int8 zero",
    "int4",
    "int4 zero",
    *([] if INTERPRETED else ["fp8", "fp8 groups"]),
]


def packed(weight: Tensor, form: str, group: int = 16) -> PackedWeight:
    """Codes of a form, with groups and zero points where its name says so; random ones are as good as any."""
    kind, _, more = form.partition(" ")
    made = pack_weight(weight, kind, group, largest_magnitudes(weight, kind, group))
    n, k = weight.shape
    random = torch.Generator().manual_seed(n + k)
    scale, zero = made.scale, None
    if more:
        groups = 1 if more == "zero" and kind == "int8" else k // group
        scale = torch.rand(n, groups, generator=random).to(DEVICE) + 0.1
    if more == "zero":
        zero = torch.randint(0, 16, scale.shape, generator=random).to(
            DEVICE, torch.uint8 if kind == "int4" else torch.int16
        )
    return PackedWeight(codes=made.codes, scale=scale, zero=zero)


@pytest.mark.parametrize("form", FORMS[1:])
def test_codes_become_the_weight(form: str) -> None:
    """Bit for bit in float32; narrower ones are truncated by the interpreter."""
    sizes = [(5, 48), (3, 4160)] if form == "int4" or not INTERPRETED else [(5, 48)]
    for (n, k), dtype in itertools.product(sizes, (torch.float32, torch.bfloat16)):
        weight = packed(torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(DEVICE), form)
        found, wanted = launch_unpack(weight.codes, weight.scale, weight.zero, dtype), weight.unpacked(dtype)
        if INTERPRETED and dtype == torch.bfloat16:
            assert torch.allclose(found.float(), wanted.float(), rtol=1e-2)
        else:
            assert torch.equal(found, wanted)


def test_a_try_tells_whether_codes_become_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unpacks_alike(torch.uint8, torch.int16, torch.float32, torch.float32, DEVICE) == ""
    real = packed_weight_triton.launch_unpack
    monkeypatch.setattr(packed_weight_triton, "launch_unpack", lambda *given: real(*given) * 1.001)
    with pytest.warns(
        UserWarning, match="no Triton for packed weights of torch.int8, which is slower: its weights are not"
    ):
        assert unpacks_alike(torch.int8, None, torch.float32, torch.float32, DEVICE)


# Triton's interpreter takes seconds for each of these.
_INT4_AGAIN = [("int4", torch.bfloat16), ("int4 zero", torch.float32)]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(form, dtype, marks=pytest.mark.slow if (form, dtype) in _INT4_AGAIN else ())
        for form in FORMS
        for dtype in (torch.float32, torch.bfloat16, *([] if INTERPRETED else [torch.float16]))
    ],
)
def test_one_row(form: str, dtype: torch.dtype) -> None:
    for n, k in SIZES:
        for biased in (False, True):
            check_one_row(form, dtype, n, k, None, biased)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("float", torch.bfloat16),
        ("int4", torch.bfloat16),
        ("int4 zero", torch.float16),
        ("int8 groups", torch.bfloat16),
        ("int8", torch.float16),
        ("int4", torch.float32),
        pytest.param("int8 zero", torch.float16, marks=pytest.mark.slow),
    ],
)
def test_one_row_by_words(form: str, dtype: torch.dtype) -> None:
    """Words of eight bytes: fewer than a program has threads, more, and a multiple of them; of codes, rows of 16 bits alone."""
    for k in (48, 1088, 1024):
        check_one_row(form, dtype, 3, k, Tile(2, 32, 1, words=True), k == 48)
        if not INTERPRETED and k == 1088:
            for tile in word_tiles(16 if form == "float" else int(form[3]), gated=False):
                check_one_row(form, dtype, 2050, k, tile, False)
    if form == "int4 zero":  # words of a scale, 3, that do not divide those of a step
        check_one_row(form, dtype, 4, 48 * 33, Tile(4, 32, 1, words=True), False, group=48)


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_rows_in_whole_numbers_are_exact_to_15_bits(form: str) -> None:
    """Beside one large element, of which 2^-15 is lost in each of the 16 or 8 that share a word; others lose nothing."""
    random = torch.Generator().manual_seed(3)
    n, k, per = 4, 1024, 16 if form == "int4" else 8
    x = torch.randn(k, generator=random).to(DEVICE, torch.float16)
    x[100] = 2000.0
    made = packed(torch.randn(n, k, generator=random).to(DEVICE), form)
    weight = made.unpack(torch.float64)
    found = product(x, made.codes, None, made.scale, made.zero, tile=Tile(4, 32, 1, words=True)).double()
    wanted = F.linear(x.double(), weight)
    most = x.double().abs().view(-1, per).amax(1).repeat_interleave(per) * 2.0**-15  # half of it by rounding
    allowed = F.linear(most, weight.abs()) + wanted.abs() * 2.0**-11 + 1e-3  # and the output's dtype
    assert bool(((found - wanted).abs() <= allowed).all())
    for odd in (float("inf"), float("-inf"), float("nan")):
        x[7] = odd
        assert product(x, made.codes, None, made.scale, made.zero, tile=Tile(4, 32, 1, words=True)).isnan().all()


def check_one_row(
    form: str, dtype: torch.dtype, n: int, k: int, tile: Tile | None, biased: bool, group: int = 16
) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=random).to(DEVICE, dtype) for s in ((1, 1, k), (n, k), (n,)))
    given = bias if biased else None
    if form == "float":
        wanted, found = F.linear(x.double(), weight.double()), product(x, weight, given, tile=tile)
    else:
        made = packed(weight, form, group)
        wanted = F.linear(x.double(), made.unpack(torch.float64))
        found = product(x, made.codes, given, made.scale, made.zero, tile=tile)
    wanted = wanted + bias.double() if biased else wanted
    error = float((found.double() - wanted).abs().max() / wanted.abs().max())
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-2}[dtype]
    assert found.shape == (1, 1, n) and error < bound, (n, k, error)


@pytest.mark.parametrize(
    ("tile", "dtype"),
    [(None, torch.float32), (Tile(4, 32, 1, words=True), torch.float16)],
    ids=["by shape", "words"],
)
@pytest.mark.parametrize("form", ["float", "int8 zero", "int4 zero"])
def test_what_stands_around_a_product(form: str, tile: Tile | None, dtype: torch.dtype) -> None:
    """A norm before, a second product that gates, a bias and a residual behind."""
    random = torch.Generator().manual_seed(1)
    n, k = 6, 96
    draw = lambda *shape: torch.randn(*shape, generator=random).to(DEVICE, dtype)  # noqa: E731
    x, weights, biases, gain, residual = draw(1, 1, k), draw(2, n, k), draw(2, n), draw(k), draw(1, 1, n)
    if form == "float":
        exact, given = (
            weights.double(),
            [(weight, bias, None, None) for weight, bias in zip(weights, biases, strict=True)],
        )
    else:
        made = [packed(weight, form) for weight in weights]
        made = [replace(each, scale=each.scale / 64) for each in made]  # so that float16 can hold the outputs
        exact = torch.stack([each.unpack(torch.float64) for each in made])
        given = [(each.codes, bias, each.scale, each.zero) for each, bias in zip(made, biases, strict=True)]
    normed = F.rms_norm(x.double(), (k,), gain.double(), 1e-5)
    gate, up = (F.linear(normed, exact[i], biases[i].double()) for i in (0, 1))
    layers = [RowWeight(*each) for each in given]
    there = [RowWeight(*(part if part is None else part.cpu() for part in layer)) for layer in layers]
    wanted = F.silu(gate) * up + residual.double()
    for found in (
        product(x, *layers[1], gate=layers[0], norm=(gain, 1e-5), add=residual, tile=tile),
        row_product(x.cpu(), there[1], gate=there[0], norm=(gain.cpu(), 1e-5), add=residual.cpu()),  # the reference
    ):
        error = float((found.cpu().double() - wanted.cpu()).abs().max() / wanted.abs().max())
        assert error < (1e-5 if dtype == torch.float32 else 1e-3)


def test_a_program_is_no_wider_than_the_weight() -> None:
    """Where ranks split k, more rows take the place of columns that are not there."""
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16)
    sizes = {k: RowCall(RowWeight(weight[:, :k])).known_tile()[:2] for k in (4096, 3584, 1024, 512, 32)}
    assert sizes == {4096: (2, 2048), 3584: (2, 2048), 1024: (4, 1024), 512: (8, 512), 32: (8, 32)}
    normed = RowCall(
        RowWeight(weight), norm=(weight[0], 1e-5)
    )  # the more rows, the fewer programs read the norm's gain
    assert normed.known_tile() == Tile(8, 1024, 4) and normed._replace(gate=normed.layer).known_tile() == Tile(
        4, 2048, 8
    )


def test_the_fastest_tile_is_taken_if_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.kernels import row_product_triton, row_tiles

    monkeypatch.setattr(row_tiles, "_LEAST_BYTES", 0)
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    call = RowCall(RowWeight(weight))
    known, words = call.known_tile(), word_tiles(16, gated=False)
    real, ran = row_product_triton.product, []

    def wrong(*given: object, tile: Tile, **more: object) -> Tensor:
        ran.append(tile)
        if tile == words[1]:
            raise RuntimeError("ptxas: no such file")
        return real(*given, tile=tile, **more) * (1.1 if tile == words[0] else 1.0)

    monkeypatch.setattr(row_product_triton, "product", wrong)

    def measured(times: dict[Tile, float]) -> Tile:
        def time(runs: Sequence[Callable[[], object]]) -> list[float]:
            ran.clear()
            for run in runs:
                run()
            return [times.get(tile, 1.0) for tile in ran[::2]]  # each makes two calls

        with pytest.warns(UserWarning, match="which may be slower: ptxas"):
            [(kind, tile)] = measured_row_tiles([call, call], torch.bfloat16, time).items()
        assert kind == call.kind(torch.bfloat16)
        return tile

    assert measured({known: 1.0, words[0]: 0.1, words[1]: 0.1, words[2]: 0.99}) == known
    assert measured({known: 1.0, words[2]: 0.97}) == words[2]
    assert call._replace(layer=RowWeight(weight[:, 1:])).word_bits(torch.bfloat16) == 0
    codes = RowCall(RowWeight(weight.to(torch.int8), None, weight[:, :1]), norm=(weight[0], 1e-5))
    assert codes.word_bits(torch.bfloat16) == 8 and codes.word_bits(torch.float32) == 0
    assert codes._replace(norm=(weight[0].float(), 1e-5)).word_bits(torch.bfloat16) == 0
    monkeypatch.setattr(row_tiles, "_measured", {})
    take_row_tiles({call.kind(torch.bfloat16): words[2]})
    assert call.tile(torch.bfloat16) == words[2] and call.tile(torch.float32) == known
    assert measured_row_tiles([call], torch.bfloat16) == {}  # once is enough


@pytest.mark.parametrize(
    "form", ["float", *(pytest.param(form, marks=pytest.mark.slow) for form in ("int8", "int4 zero"))]
)
def test_products_that_begin_early_are_the_same(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the result of the one before; the interpreter, where nothing overlaps, only runs what is loaded ahead."""
    import triton.language as tl

    if INTERPRETED:
        for name in ("gdc_wait", "gdc_launch_dependents"):
            monkeypatch.setattr(tl.extra.cuda, name, lambda: None)
    elif torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels begin early from Hopper on")
    n = 32 if INTERPRETED else 4096
    random = torch.Generator().manual_seed(2)
    x, gain = (torch.randn(n, generator=random).to(DEVICE, torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, n, generator=random).to(DEVICE, torch.bfloat16) / n**0.5
    layer = RowWeight(weight)
    if form != "float":
        made = packed(weight, form)
        layer = RowWeight(made.codes, None, made.scale / made.scale.mean(), made.zero)
    tiles = [None, Tile(2, 32, 2, words=False), Tile(8, 64, 2, words=True)]

    def chain() -> list[Tensor]:
        found = [x]
        for i in range(3 if INTERPRETED else 30):
            gate = layer if i % 3 == 2 else None
            y = product(found[-1], *layer, gate=gate, norm=(gain, 1e-5), tile=tiles[i % 3])
            found.append(y / y.norm() if i % 2 else product(y, *layer, add=y, tile=tiles[i % 3]))
        return found

    wanted = chain()
    with overlapped_launches():
        found = chain()
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine.float() - theirs.float()).norm()) <= 1e-2 * float(theirs.float().norm())
