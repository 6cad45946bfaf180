"""Rotary position embedding in Triton: a program rotates all heads of one token, of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels import rotary as plain
from meshfold.kernels._triton import Prepared, remember
from meshfold.kernels.overlap import early


@triton.jit
def _turn(
    x,
    out,
    heads,
    head_stride,
    feature_stride,
    out_head_stride,
    out_feature_stride,
    half,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    feature = tl.arange(0, HALF)[None, :]
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        mask = (head < heads) & (feature < half)
        here = x + head * head_stride + feature * feature_stride
        a = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(here + half * feature_stride, mask=mask, other=0.0).to(tl.float32)
        there = out + head * out_head_stride + feature * out_feature_stride
        kind = out.dtype.element_ty
        tl.store(there, (a * cos_a - b * sin_a).to(kind), mask=mask)
        tl.store(there + half * out_feature_stride, (b * cos_b + a * sin_b).to(kind), mask=mask)


@triton.jit(do_not_specialize=["length"])
def _rotate(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    length,
    q_heads,
    k_heads,
    half,
    q_b,
    q_s,
    q_h,
    q_d,
    k_b,
    k_s,
    k_h,
    k_d,
    qo_b,
    qo_s,
    qo_h,
    qo_d,
    ko_b,
    ko_s,
    ko_h,
    ko_d,
    cos_b,
    cos_s,
    cos_d,
    sin_b,
    sin_s,
    sin_d,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    batch = token // length
    place = token % length
    feature = tl.arange(0, HALF)
    mask = feature < half
    cos += batch * cos_b + place * cos_s
    sin += batch * sin_b + place * sin_s
    cos_first = tl.load(cos + feature * cos_d, mask=mask, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + (feature + half) * cos_d, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + feature * sin_d, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + (feature + half) * sin_d, mask=mask, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        # The transpose of [[cos_a, -sin_a], [sin_b, cos_b]]: swap the sines and negate them.
        kept = sin_first
        sin_first = -sin_second
        sin_second = -kept
    _turn(
        q + batch * q_b + place * q_s,
        q_out + batch * qo_b + place * qo_s,
        q_heads,
        q_h,
        q_d,
        qo_h,
        qo_d,
        half,
        cos_first,
        cos_second,
        sin_first,
        sin_second,
        HEADS,
        HALF,
    )
    _turn(
        k + batch * k_b + place * k_s,
        k_out + batch * ko_b + place * ko_s,
        k_heads,
        k_h,
        k_d,
        ko_h,
        ko_d,
        half,
        cos_first,
        cos_second,
        sin_first,
        sin_second,
        HEADS,
        HALF,
    )


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, inverse: bool) -> None:
    if torch.float64 in (k.dtype, cos.dtype, sin.dtype):
        return plain.rotate(q, k, cos, sin, q_out, k_out, inverse)
    half = cos.shape[-1] // 2
    if half:
        each = (q, k, cos, sin, q_out, k_out)
        numbers = (q.shape[1], q.shape[2], k.shape[2], half)
        strides = (*q.stride(), *k.stride(), *q_out.stride(), *k_out.stride(), *cos.stride(), *sin.stride())
        begins = early()
        key = (q.shape[0], numbers, strides, *[x.dtype for x in each], inverse, q.get_device(), begins["EARLY"])
        found = _known.get(key)
        if found is None:
            found = remember(_known, key, _prepared(q.shape[0], numbers, strides, inverse, begins))
        found.run(*each)
    for x, out in ((q, q_out), (k, k_out)):
        if out is not x and 2 * half < x.shape[-1]:
            out[..., 2 * half :].copy_(x[..., 2 * half :])


_known: dict[object, Prepared] = {}


def _prepared(
    batch: int, numbers: tuple[int, int, int, int], strides: tuple[int, ...], inverse: bool, begins: dict[str, Any]
) -> Prepared:
    """Return the launch for a number of rows, and tokens, heads of queries and of keys, and features of a half.

    ``begins``: whether it begins early.
    """
    tokens, heads, kv_heads, half = numbers
    wide = 1 << (half - 1).bit_length()
    most = max(heads, kv_heads, 1)
    high = min(1 << (most - 1).bit_length(), max(1, 4096 // wide))
    warps = 4 if high * wide <= 2048 else 8
    settings: dict[str, Any] = dict(INVERSE=inverse, HEADS=high, HALF=wide, num_warps=warps, **begins)
    return Prepared(_rotate, (batch * tokens,), (*numbers, *strides), **settings)
