"""Attention of single tokens over pages in Triton: a program reads a part of the pages of one sequence, for one head of keys.

All query heads that share a head of keys are computed together (GQA). A long sequence is split over several programs (flash
decoding: Dao et al., 2023). If they are few, the last of them to end combines their results; else a second kernel does. Queries and
keys may be turned by their positions here. The keys and values of the new token are written by the program that reads its page; so
the pool is read once, and nothing else runs before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.overlap import early
from meshfold.kernels.paged_attention import CACHE_FORMS
from meshfold.kernels.weights_ahead import Ahead, launch_ahead
from meshfold.kernels.weights_ahead_triton import ask, asking

_LOG2_E = 1.4426950408889634
_BLOCK = 64
_WARPS = 4
_MOST_COMBINED = 8
"""Programs of a sequence whose results the last of them combines, at most."""


@triton.jit
def _coded(x, like, TOP: tl.constexpr, WHOLE: tl.constexpr):
    """Return codes of a row, in the dtype of what ``like`` points to, and their scale: formulas of ``to_codes``."""
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    # A division by / is approximate on a GPU, and would give another code in a few of a million elements.
    scale = tl.where(largest > 0, largest * (1.0 / TOP), 1.0)
    level = tl.minimum(tl.maximum(tl.div_rn(wide, tl.broadcast_to(scale, wide.shape)), -TOP), TOP)
    if WHOLE:
        level = (level + 12582912.0) - 12582912.0  # rounds to the nearest whole number, half to even
    return level.to(like.dtype.element_ty), scale


@triton.jit
def _turned(x, at, feature, inside, cos, sin, half):
    """Return heads of a token, which are loaded from ``x + at + feature``, turned by its position and rounded."""
    first = feature < half
    one = tl.load(x + at + feature, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + at + tl.where(first, feature + half, feature - half), mask=inside, other=0.0).to(tl.float32)
    return tl.where(first, one * cos - other * sin, one * cos + other * sin).to(x.dtype.element_ty)


@triton.jit
def _attend(
    q,
    k,
    v,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    positions,
    cos,
    sin,
    parts,
    most,
    total,
    arrived,
    out,
    scale,
    window,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    page_stride,
    head_stride,
    table_row,
    cos_row,
    d,
    first_ahead,
    second_ahead,
    pieces,
    TOP: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    TURNS: tl.constexpr,
    COMBINES: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
):
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    if AHEAD and split >= SPLITS:
        number = ((split - SPLITS) * kv_heads + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        ask(first_ahead, second_ahead, pieces, number, THREADS)
        return
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    heads = kv_heads * GROUP
    position = tl.load(positions + row)
    first = tl.maximum(position + 1 - window, 0) // BLOCK * BLOCK
    blocks = (position - first) // BLOCK + 1
    each = (blocks + SPLITS - 1) // SPLITS * BLOCK
    start = first + split * each
    stop = tl.minimum(start + each, position)

    group, feature, token = tl.arange(0, PADDED), tl.arange(0, D), tl.arange(0, BLOCK)
    mine, inside = group < GROUP, feature < d
    queries = row * q_row + (head * GROUP + group)[:, None] * q_head
    both = mine[:, None] & inside[None, :]
    if TURNS:
        cosine = tl.load(cos + row * cos_row + feature, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sin + row * cos_row + feature, mask=inside, other=0.0).to(tl.float32)
        query = _turned(q, queries, feature[None, :], both, cosine[None, :], sine[None, :], d // 2)
        new_k = _turned(k, row * k_row + head * k_head, feature, inside, cosine, sine, d // 2)
    else:
        query = tl.load(q + queries + feature[None, :], mask=both, other=0.0)
        new_k = tl.load(k + row * k_row + head * k_head + feature, mask=inside, other=0.0)
    new_v = tl.load(v + row * v_row + head * v_head + feature, mask=inside, other=0.0)
    kept_k, kept_v = new_k, new_v
    if TOP > 0:
        kept_k, scale_k = _coded(new_k, keys, TOP, WHOLE)
        kept_v, scale_v = _coded(new_v, values, TOP, WHOLE)
        new_k = (kept_k.to(tl.float32) * scale_k).to(query.dtype)
        new_v = (kept_v.to(tl.float32) * scale_v).to(query.dtype)
    owns = (start <= position) & (position < start + each)
    if owns:
        page = tl.load(tables + row * table_row + position // SIZE)
        there = page * page_stride + head * head_stride + (position % SIZE) * d
        tl.store(keys + there + feature, kept_k, mask=inside)
        tl.store(values + there + feature, kept_v, mask=inside)
        if TOP > 0:
            tl.store(key_scales + there // d, scale_k)
            tl.store(value_scales + there // d, scale_v)

    # The new token is the first that the program sees, from its registers: a loop over kept ones alone copies what it loads to
    # where matrix products read it, and nothing else.
    one = tl.sum(query.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
    largest = tl.where(owns, one, -float("inf"))
    sums = tl.where(owns, 1.0, 0.0) + tl.zeros((PADDED,), tl.float32)
    acc = tl.where(owns, new_v.to(tl.float32), 0.0)[None, :] + tl.zeros((PADDED, D), tl.float32)
    for at in range(start, stop, BLOCK):
        place = at + token
        seen = (place < position) & (place > position - window)
        both_seen = seen[:, None] & inside[None, :]
        page = tl.load(tables + row * table_row + place // SIZE, mask=seen, other=0)
        token_at = page * page_stride + head * head_stride + (place % SIZE) * d
        where = token_at[:, None] + feature[None, :]
        key = tl.load(keys + where, mask=both_seen, other=0.0)
        value = tl.load(values + where, mask=both_seen, other=0.0)  # here, so that it comes while scores are computed
        if TOP > 0:
            factor = tl.load(key_scales + token_at // d, mask=seen, other=0.0)
            key = (key.to(tl.float32) * factor[:, None]).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(largest, tl.max(score, 1))
        shrink = tl.exp2(largest - higher)
        weight = tl.exp2(score - higher[:, None])
        sums = sums * shrink + tl.sum(weight, 1)
        if TOP > 0:
            factor = tl.load(value_scales + token_at // d, mask=seen, other=0.0)
            value = (value.to(tl.float32) * factor[:, None]).to(query.dtype)
        acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        largest = higher

    at = row * heads + head * GROUP + group
    there = out + at[:, None] * d + feature[None, :]
    if SPLITS == 1:
        tl.store(there, (acc / sums[:, None]).to(out.dtype.element_ty), mask=both)
    else:
        part = at * SPLITS + split
        tl.store(parts + part[:, None] * d + feature[None, :], acc, mask=both)
        tl.store(most + part, largest, mask=mine)
        tl.store(total + part, sums, mask=mine)
        if COMBINES:
            tl.debug_barrier()  # all threads have written before one says so
            before = tl.atomic_add(arrived + row * kv_heads + head, 1, sem="acq_rel")
            if before == SPLITS - 1:  # all others have
                tl.store(arrived + row * kv_heads + head, 0)  # for the next call
                highest = tl.full((PADDED,), -float("inf"), tl.float32)
                for i in tl.static_range(SPLITS):
                    here = tl.load(most + at * SPLITS + i, mask=mine, other=0.0, cache_modifier=".cg")
                    highest = tl.maximum(highest, here)
                whole = tl.zeros((PADDED,), tl.float32)
                mean = tl.zeros((PADDED, D), tl.float32)
                for i in tl.static_range(SPLITS):
                    part = at * SPLITS + i
                    share = tl.exp2(tl.load(most + part, mask=mine, other=0.0, cache_modifier=".cg") - highest)
                    whole += share * tl.load(total + part, mask=mine, other=1.0, cache_modifier=".cg")
                    found = parts + part[:, None] * d + feature[None, :]
                    mean += share[:, None] * tl.load(found, mask=both, other=0.0, cache_modifier=".cg")
                tl.store(there, (mean / whole[:, None]).to(out.dtype.element_ty), mask=both)


@triton.jit
def _combine(parts, most, total, out, d, D: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64)
    split, feature = tl.arange(0, SPLITS), tl.arange(0, D)
    inside = feature < d
    largest = tl.load(most + at * SPLITS + split)
    share = tl.exp2(largest - tl.max(largest, 0))
    sums = tl.sum(share * tl.load(total + at * SPLITS + split), 0)
    part = tl.load(parts + (at * SPLITS + split)[:, None] * d + feature[None, :], mask=inside[None, :], other=0.0)
    y = tl.sum(part * share[:, None], 0) / sums
    tl.store(out + at * d + feature, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep(
    k,
    v,
    keys,
    values,
    pages,
    offsets,
    tokens,
    k_row,
    k_head,
    v_row,
    v_head,
    page_stride,
    head_stride,
    d,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    inside, feature = row < tokens, tl.arange(0, D)[None, :]
    both = inside[:, None] & (feature < d)
    page = tl.load(pages + row, mask=inside, other=0)
    offset = tl.load(offsets + row, mask=inside, other=0)
    there = (page * page_stride + head * head_stride + offset * d)[:, None] + feature
    tl.store(keys + there, tl.load(k + (row * k_row + head * k_head)[:, None] + feature, mask=both), mask=both)
    tl.store(values + there, tl.load(v + (row * v_row + head * v_head)[:, None] + feature, mask=both), mask=both)


def keep_rows(k: Tensor, v: Tensor, kept: Tensor, page: Tensor, offset: Tensor) -> None:
    """Write keys and values of tokens to their places.

    Args:
        k, v: ``t kv_heads d``, of the pool's dtype.
        kept: ``2 pages kv_heads size d``, contiguous.
        page, offset: int64 ``t``, contiguous: the place of each token.
    """
    (tokens, kv_heads, d), rows = k.shape, 16
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1), kept.stride(1), kept.stride(2))
    given = (k, v, kept[0], kept[1], page, offset, tokens, *strides, d)
    launch(_keep, (cdiv(tokens, rows), kv_heads), k, *given, D=triton.next_power_of_2(d), ROWS=rows, num_warps=4)


def attend_new(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    scales: Tensor | None,
    tables: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    splits: int | None = None,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """Keep the keys and values of one token of each of many sequences, and attend with it: ``b heads d`` -> ``b heads d``.

    Args:
        q: queries ``b heads d``; k, v: ``b kv_heads d`` of the same dtype.
        kept: ``2 pages kv_heads size d``, contiguous: of that dtype, or codes.
        scales: of codes, ``2 pages kv_heads size``, contiguous.
        tables: ``b w`` int64, the pages of each sequence.
        positions: ``b`` int64, of the tokens; the page of each is in its row of ``tables``.
        scale: of the scores.
        window: a token sees itself and ``window - 1`` before; None: all before.
        splits: programs that share a sequence, a power of two; None to choose.
        rotary: cosines and sines ``b d``, which turn q and k as :func:`meshfold.kernels.apply_rotary` does; None: they do not turn.
        arrived: int32 zeros, where programs count those of their sequence that have ended; None: a second kernel combines.
    """
    b, heads, d = q.shape
    kv_heads, size = kept.shape[2], kept.shape[3]
    group = heads // kv_heads
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if splits is None:
        splits = _splits(b * kv_heads, tables.shape[1] * size, q)
    wide = triton.next_power_of_2(max(d, 16))
    out = torch.empty(b, heads, d, dtype=q.dtype, device=q.device)
    parts, most, total = out, out, out
    if splits > 1:
        parts = torch.empty(b, heads, splits, d, dtype=torch.float32, device=q.device)
        most, total = torch.empty(2, b, heads, splits, dtype=torch.float32, device=q.device)
    combines = arrived is not None and splits <= _MOST_COMBINED and b * kv_heads <= arrived.numel()
    cos, sin = (q, q) if rotary is None else (each.contiguous() for each in rotary)

    def run(ahead: Ahead) -> None:
        spare = ahead.programs(32 * _WARPS)
        launch(
            _attend,
            (b, kv_heads, splits + cdiv(spare, b * kv_heads)),
            q,
            q,
            k,
            v,
            kept[0],
            kept[1],
            q if scales is None else scales[0],  # what is not there is not read
            q if scales is None else scales[1],
            tables,
            positions,
            cos,
            sin,
            parts,
            most,
            total,
            arrived if combines else positions,
            out,
            scale * _LOG2_E,
            (1 << 40) if window is None else window,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            kept.stride(1),
            kept.stride(2),
            tables.stride(0),
            cos.stride(0),
            d,
            *ahead,
            TOP=0.0 if scales is None else _largest_code(kept),
            WHOLE=kept.dtype == torch.int8,
            GROUP=group,
            PADDED=max(triton.next_power_of_2(group), 16),
            D=wide,
            SIZE=size,
            BLOCK=_BLOCK,
            SPLITS=splits,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            TURNS=rotary is not None,
            COMBINES=combines,
            num_warps=_WARPS,
            num_stages=3 if wide <= 128 else 2,
            **early(),
            **asking(ahead, _WARPS),
        )

    launch_ahead(run)
    if splits > 1 and not combines:
        given = (parts, most, total, out, d)
        launch(_combine, (b * heads,), q, *given, D=wide, SPLITS=splits, num_warps=4, **early())
    return out


def _largest_code(kept: Tensor) -> float:
    return next(largest for dtype, largest in CACHE_FORMS.values() if dtype == kept.dtype)


def _splits(programs: int, tokens: int, like: Tensor) -> int:
    """Return how many programs share a sequence of at most this many tokens, so that all multiprocessors read."""
    units = torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 8
    most = min(max(2 * units // programs, 1), max(tokens // _BLOCK, 1), 64)
    return 1 << (most.bit_length() - 1)
