"""The merge of partial attention in Triton: a program takes some rows, each one head of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels import merge_attention as plain
from meshfold.kernels._triton import cdiv, launch, tile


@triton.jit(do_not_specialize=["length", "rows"])
def _merge(
    out,
    lse,
    part,
    part_lse,
    length,
    rows,
    heads,
    columns,
    out_b,
    out_s,
    out_h,
    out_d,
    lse_b,
    lse_h,
    lse_s,
    part_b,
    part_s,
    part_h,
    part_d,
    plse_b,
    plse_h,
    plse_s,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    head = row % heads
    token = (row // heads) % length
    batch = row // heads // length
    here = lse + batch * lse_b + head * lse_h + token * lse_s
    a = tl.load(here, mask=real, other=0.0)
    b = tl.load(part_lse + batch * plse_b + head * plse_h + token * plse_s, mask=real, other=0.0).to(tl.float32)
    highest = tl.maximum(a, b)
    # If neither side has seen a key, inf - inf would be NaN; such a row stays zero.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    kept = tl.exp(a - shift)
    added = tl.exp(b - shift)
    both = kept + added
    scale = tl.where(both > 0.0, 1.0 / tl.where(both > 0.0, both, 1.0), 0.0)
    total = tl.where(both > 0.0, shift + tl.log(tl.where(both > 0.0, both, 1.0)), float("-inf"))
    tl.store(here, total, mask=real)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = real[:, None] & (column < columns)
    at = out + (batch * out_b + token * out_s + head * out_h)[:, None] + column * out_d
    x = tl.load(at, mask=mask, other=0.0)
    y = tl.load(
        part + (batch * part_b + token * part_s + head * part_h)[:, None] + column * part_d,
        mask=mask,
        other=0.0,
    ).to(tl.float32)
    tl.store(at, x * (kept * scale)[:, None] + y * (added * scale)[:, None], mask=mask)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    if torch.float64 in (out.dtype, lse.dtype, part.dtype, part_lse.dtype):
        return plain.merge(out, lse, part, part_lse)
    b, s, heads, d = out.shape
    high, wide, warps = tile(d)
    rows = b * s * heads
    launch(
        _merge,
        (cdiv(rows, high),),
        out,
        out,
        lse,
        part,
        part_lse,
        s,
        rows,
        heads,
        d,
        *out.stride(),
        *lse.stride(),
        *part.stride(),
        *part_lse.stride(),
        ROWS=high,
        COLUMNS=wide,
        num_warps=warps,
    )
