"""The Triton kernel against the reference: on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1.

``test_paged_attention.py`` runs this file in a process of its own, since the interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import contextlib
import itertools

import torch
from patched_language import patched_once

from meshfold.kernels import CACHE_FORMS, KeyValuePages, attend_singles
from meshfold.kernels.paged_attention_triton import attend_new, keep_rows
from meshfold.kernels.rotary import turned

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compare(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    d: int,
    size: int,
    window: int | None,
    splits: int,
    form: str | None = None,
    *,
    turns: bool = False,
    combines: bool = False,
) -> None:
    random = torch.Generator().manual_seed(heads + d + size)
    lengths = [1, size + 1, 70, 130]
    b, width = len(lengths), -(-max(lengths) // size) + 1
    pages = b * width + 1
    draw = lambda *shape: torch.randn(*shape, generator=random).to(DEVICE, dtype)  # noqa: E731
    scales = None if form is None else torch.rand(2, pages, kv_heads, size, generator=random).to(DEVICE) + 0.1
    kept = draw(2, pages, kv_heads, size, d)
    if form is not None:
        kept = (kept * (30 if form == "int8" else 1)).to(CACHE_FORMS[form][0])
    tables = torch.randperm(pages - 1, generator=random)[: b * width].view(b, width).to(DEVICE)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    qkv = draw(b, heads + 2 * kv_heads, d)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    wanted = KeyValuePages(kept.clone(), None if scales is None else scales.clone(), dtype)
    rotary, given = None, (q, k)
    if turns:
        angles = torch.randn(b, d // 2, generator=random).to(DEVICE).repeat(1, 2)
        rotary = (angles.cos(), angles.sin())
        given = tuple(turned(x[:, None], *(each[:, None] for each in rotary))[:, 0] for x in (q, k))
    page, offset = tables.gather(1, (positions // size)[:, None])[:, 0], positions % size
    wanted.keep(page, offset, given[1], v)
    scale = d**-0.5
    wide = KeyValuePages(wanted.kept if scales is not None else wanted.kept.double(), wanted.scale, torch.float64)
    expected = attend_singles(given[0].double(), wide, tables, positions, scale, window)
    arrived = torch.zeros(b * kv_heads, dtype=torch.int32, device=DEVICE) if combines else None
    options = dict(rotary=rotary, arrived=arrived)
    found = attend_new(q, k, v, kept, scales, tables, positions, scale, window, splits, **options)
    assert arrived is None or not arrived.any(), "the next call would count on"
    if dtype == torch.float32:  # a GPU may turn a pair by a fused multiplication and addition, which rounds once less
        torch.testing.assert_close(kept, wanted.kept, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(kept.view(torch.uint8), wanted.kept.view(torch.uint8)), "the pool"
    assert scales is None or torch.equal(scales, wanted.scale), "the scales"  # type: ignore[arg-type]
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    error = float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1))
    assert error < tolerance, (dtype, heads, kv_heads, d, size, window, splits, error)


def keep(dtype: torch.dtype, tokens: int, kv_heads: int, d: int, size: int) -> None:
    """Keys and values are parts of one tensor, as a layer makes them."""
    random = torch.Generator().manual_seed(tokens)
    kept = torch.randn(2, 9, kv_heads, size, d, generator=random).to(DEVICE, dtype)
    _, k, v = torch.randn(tokens, 3 * kv_heads, d, generator=random).to(DEVICE, dtype).split(kv_heads, 1)
    places = torch.randperm(9 * size, generator=random)[:tokens].to(DEVICE)
    page, offset, wanted = places // size, places % size, kept.clone()
    for i, x in enumerate((k, v)):
        wanted[i][page, :, offset] = x
    keep_rows(k, v, kept, page, offset)
    assert torch.equal(kept, wanted), (dtype, tokens, kv_heads, d, size)


def main() -> None:
    for dtype, shape in (
        (torch.float32, (21, 2, 24, 4)),
        (torch.float16, (16, 3, 64, 2)),
        (torch.float32, (1, 1, 16, 1)),
    ):
        keep(dtype, *shape)
    cases = [((4, 2, 24, 16), None, 1), ((6, 1, 80, 4), None, 4), ((3, 3, 16, 64), 5, 2), ((4, 2, 16, 16), 100, 4)]
    for shape, window, splits in cases:
        compare(torch.float32, *shape, window, splits)
    compare(torch.float16, 2, 2, 64, 16, 9, 1)
    for splits in (1, 2):
        compare(torch.float32, 4, 2, 24, 16, None, splits, "int8", turns=splits == 2, combines=splits == 2)
    for (heads, kv_heads, d, size), window, splits in (((4, 2, 16, 16), None, 4), ((3, 3, 24, 4), 5, 2)):
        compare(torch.float32, heads, kv_heads, d, size, window, splits, turns=True, combines=True)
    if DEVICE.type == "cuda":  # the interpreter multiplies the bits of bfloat16
        for window, splits in itertools.product((None, 9), (1, 2, 8)):
            compare(torch.bfloat16, 8, 2, 128, 16, window, splits)
            compare(torch.bfloat16, 8, 2, 128, 16, window, splits, turns=True, combines=True)
            compare(torch.bfloat16, 32, 8, 128, 16, window, splits)
            for form in CACHE_FORMS:
                compare(torch.bfloat16, 32, 8, 128, 16, window, splits, form)


if __name__ == "__main__":
    with contextlib.nullcontext() if DEVICE.type == "cuda" else patched_once():
        main()
    print("agrees")
