"""Attention with pair bias in Triton: a program takes a block of queries (or keys) of one row and one head.

Programs that follow each other share a row's keys and values, then a head's bias. Backward is three kernels: dq, then dk and dv,
then the bias gradient, where a program goes through all rows for one tile of the bias. None uses atomics: results do not
depend on the order in which programs run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch, programs
from meshfold.kernels.pair_attention import attend as plain_attend
from meshfold.kernels.pair_attention import gradients as plain_gradients

_LOG2_E = math.log2(math.e)
_WIDEST = 128


@triton.jit
def _place(length, rows, BLOCK: tl.constexpr):
    """Return what this program works on: a row, a head, and the queries (or keys) of a block, of ``length`` in all."""
    blocks = tl.cdiv(length, BLOCK)
    program = tl.program_id(0)
    row = ((program // blocks) % rows).to(tl.int64)
    head = (program // blocks // rows).to(tl.int64)
    return row, head, program % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _block(x, base, n_stride, index, count, feature, d):
    """Load rows ``index`` of ``x + base``; zero beyond ``count`` rows and ``d`` columns."""
    at = base + index[:, None] * n_stride + feature[None, :]
    return tl.load(x + at, mask=(index < count)[:, None] & (feature < d)[None, :], other=0.0)


@triton.jit
def _biases(
    bias, key_bias, bias_base, row, query, key, queries, keys, HAS_BIAS: tl.constexpr, HAS_KEY_BIAS: tl.constexpr
):
    """Return what a tile of logits is shifted by, in units of log 2; -inf where there is no key."""
    shift = tl.where((key < keys)[None, :] & (query >= 0)[:, None], 0.0, float("-inf"))
    if HAS_BIAS:
        there = (query < queries)[:, None] & (key < keys)[None, :]
        at = bias_base + query.to(tl.int64)[:, None] * keys + key[None, :]
        shift += tl.load(bias + at, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
    if HAS_KEY_BIAS:
        shift += tl.load(key_bias + row * keys + key, mask=key < keys, other=0.0).to(tl.float32)[None, :]
    return shift


@triton.jit
def _attend(
    q,
    k,
    v,
    bias,
    key_bias,
    out,
    lse,
    scale,
    rows,
    rows_each,
    heads,
    queries,
    keys,
    d,
    q_r,
    q_n,
    q_h,
    k_r,
    k_n,
    k_h,
    v_r,
    v_n,
    v_h,
    HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, query = _place(queries, rows, M)
    feature = tl.arange(0, D)
    bias_base = (row // rows_each * heads + head) * queries * keys
    mine = _block(q, row * q_r + head * q_h, q_n, query, queries, feature, d)
    largest = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for start in range(0, keys, N):
        key = start + tl.arange(0, N)
        their = _block(k, row * k_r + head * k_h, k_n, key, keys, feature, d)
        score = tl.dot(mine, tl.trans(their), input_precision=PRECISION) * scale
        score += _biases(bias, key_bias, bias_base, row, query, key, queries, keys, HAS_BIAS, HAS_KEY_BIAS)
        higher = tl.maximum(largest, tl.max(score, 1))
        # If no key has counted, inf - inf would be NaN.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(largest - shift)
        weight = tl.exp2(score - shift[:, None])
        total = total * shrink + tl.sum(weight, 1)
        value = _block(v, row * v_r + head * v_h, v_n, key, keys, feature, d)
        acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        largest = higher
    counts = total > 0.0
    safe = tl.where(counts, total, 1.0)
    real = query < queries
    at = ((row * queries + query)[:, None] * heads + head) * d + feature[None, :]
    result = (acc / safe[:, None]).to(out.dtype.element_ty)
    tl.store(out + at, result, mask=real[:, None] & (feature < d)[None, :])
    log = tl.where(counts, (largest + tl.log2(safe)) * 0.6931471805599453, -float("inf"))
    tl.store(lse + (row * heads + head) * queries + query, log, mask=real)


@triton.jit
def _dlogits(mine, their, value, dout, delta, log, scale, shift, PRECISION: tl.constexpr):
    """Return the weights of a tile and the gradient of its logits."""
    score = tl.dot(mine, tl.trans(their), input_precision=PRECISION) * scale + shift
    weight = tl.exp2(score - log[:, None])
    dweight = tl.dot(dout, tl.trans(value), input_precision=PRECISION)
    return weight, weight * (dweight - delta[:, None])


@triton.jit
def _log(lse, at, real):
    """Load log-sum-exp in units of log 2; 0 where no key counts: all weights are then exp2(-inf) = 0."""
    log = tl.load(lse + at, mask=real, other=0.0) * 1.4426950408889634
    return tl.where(log == -float("inf"), 0.0, log)


@triton.jit
def _dq(
    q,
    k,
    v,
    bias,
    key_bias,
    out,
    lse,
    dout,
    delta,
    dq,
    scale,
    rows,
    rows_each,
    heads,
    queries,
    keys,
    d,
    q_r,
    q_n,
    q_h,
    k_r,
    k_n,
    k_h,
    v_r,
    v_n,
    v_h,
    HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, query = _place(queries, rows, M)
    feature = tl.arange(0, D)
    bias_base = (row // rows_each * heads + head) * queries * keys
    base = (row * queries * heads + head) * d
    mine = _block(q, row * q_r + head * q_h, q_n, query, queries, feature, d)
    towards = _block(dout, base, heads * d, query, queries, feature, d)
    made = _block(out, base, heads * d, query, queries, feature, d)
    shared = tl.sum(towards.to(tl.float32) * made.to(tl.float32), 1)
    here = (row * heads + head) * queries + query
    tl.store(delta + here, shared, mask=query < queries)
    log = _log(lse, here, query < queries)
    acc = tl.zeros((M, D), tl.float32)
    for start in range(0, keys, N):
        key = start + tl.arange(0, N)
        their = _block(k, row * k_r + head * k_h, k_n, key, keys, feature, d)
        value = _block(v, row * v_r + head * v_h, v_n, key, keys, feature, d)
        shift = _biases(bias, key_bias, bias_base, row, query, key, queries, keys, HAS_BIAS, HAS_KEY_BIAS)
        _, dlogits = _dlogits(mine, their, value, towards, shared, log, scale, shift, PRECISION)
        acc += tl.dot(dlogits.to(their.dtype), their, input_precision=PRECISION)
    at = base + query[:, None] * (heads * d) + feature[None, :]
    result = (acc * (scale * 0.6931471805599453)).to(dq.dtype.element_ty)
    tl.store(dq + at, result, mask=(query < queries)[:, None] & (feature < d)[None, :])


@triton.jit
def _dkv(
    q,
    k,
    v,
    bias,
    key_bias,
    lse,
    dout,
    delta,
    dk,
    dv,
    scale,
    rows,
    rows_each,
    heads,
    queries,
    keys,
    d,
    q_r,
    q_n,
    q_h,
    k_r,
    k_n,
    k_h,
    v_r,
    v_n,
    v_h,
    HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, key = _place(keys, rows, N)
    feature = tl.arange(0, D)
    bias_base = (row // rows_each * heads + head) * queries * keys
    their = _block(k, row * k_r + head * k_h, k_n, key, keys, feature, d)
    value = _block(v, row * v_r + head * v_h, v_n, key, keys, feature, d)
    to_keys = tl.zeros((N, D), tl.float32)
    to_values = tl.zeros((N, D), tl.float32)
    for start in range(0, queries, M):
        query = start + tl.arange(0, M)
        mine = _block(q, row * q_r + head * q_h, q_n, query, queries, feature, d)
        towards = _block(dout, (row * queries * heads + head) * d, heads * d, query, queries, feature, d)
        here = (row * heads + head) * queries + query
        shared = tl.load(delta + here, mask=query < queries, other=0.0)
        log = _log(lse, here, query < queries)
        shift = _biases(bias, key_bias, bias_base, row, query, key, queries, keys, HAS_BIAS, HAS_KEY_BIAS)
        weight, dlogits = _dlogits(mine, their, value, towards, shared, log, scale, shift, PRECISION)
        to_values += tl.dot(tl.trans(weight.to(towards.dtype)), towards, input_precision=PRECISION)
        to_keys += tl.dot(tl.trans(dlogits.to(mine.dtype)), mine, input_precision=PRECISION)
    at = ((row * keys + key)[:, None] * heads + head) * d + feature[None, :]
    real = (key < keys)[:, None] & (feature < d)[None, :]
    tl.store(dk + at, (to_keys * (scale * 0.6931471805599453)).to(dk.dtype.element_ty), mask=real)
    tl.store(dv + at, to_values.to(dv.dtype.element_ty), mask=real)


@triton.jit
def _dbias(
    q,
    k,
    v,
    bias,
    key_bias,
    lse,
    dout,
    delta,
    parts,
    scale,
    batches,
    rows_each,
    heads,
    queries,
    keys,
    d,
    splits,
    q_r,
    q_n,
    q_h,
    k_r,
    k_n,
    k_h,
    v_r,
    v_n,
    v_h,
    HAS_BIAS: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    high, wide = tl.cdiv(queries, M), tl.cdiv(keys, N)
    program = tl.program_id(0)
    key = program % wide * N + tl.arange(0, N)
    query = program // wide % high * M + tl.arange(0, M)
    plane = (program // wide // high).to(tl.int64)  # split, batch, head
    head, batch, split = plane % heads, plane // heads % batches, plane // heads // batches
    feature = tl.arange(0, D)
    bias_base = (batch * heads + head) * queries * keys
    each = tl.cdiv(rows_each, splits)
    first = split * each
    acc = tl.zeros((M, N), tl.float32)
    for index in range(first, tl.minimum(first + each, rows_each)):
        row = batch * rows_each + index
        mine = _block(q, row * q_r + head * q_h, q_n, query, queries, feature, d)
        their = _block(k, row * k_r + head * k_h, k_n, key, keys, feature, d)
        value = _block(v, row * v_r + head * v_h, v_n, key, keys, feature, d)
        towards = _block(dout, (row * queries * heads + head) * d, heads * d, query, queries, feature, d)
        here = (row * heads + head) * queries + query
        shared = tl.load(delta + here, mask=query < queries, other=0.0)
        log = _log(lse, here, query < queries)
        shift = _biases(bias, key_bias, bias_base, row, query, key, queries, keys, HAS_BIAS, HAS_KEY_BIAS)
        _, dlogits = _dlogits(mine, their, value, towards, shared, log, scale, shift, PRECISION)
        acc += dlogits
    at = (plane * queries + query)[:, None] * keys + key[None, :]
    tl.store(parts + at, acc, mask=(query < queries)[:, None] & (key < keys)[None, :])


def _takes(q: Tensor, *others: Tensor) -> bool:
    """Return True for tensors that the kernels compute with: of one dtype, not empty, heads of at most 128 elements."""
    return q.shape[-1] <= _WIDEST and q.numel() > 0 and all(x.dtype == q.dtype and x.numel() > 0 for x in others)


def _rows(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """``b r n h d``: return a tensor with neighbouring features side by side, and its strides over (b r), n and h."""
    b, r = x.shape[:2]
    if x.stride(4) != 1 or (b > 1 and x.stride(0) != r * x.stride(1)):
        x = x.contiguous()
    return x, (x.stride(1), x.stride(2), x.stride(3))


def _masks(bias: Tensor | None, key_bias: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return bias and key bias contiguous; ``like`` replaces a missing one."""
    return (
        like if bias is None else bias.contiguous(),
        like if key_bias is None else key_bias.contiguous(),
    )


def _settings(q: Tensor, bias: Tensor | None, key_bias: Tensor | None, high: int) -> dict[str, Any]:
    """Return the constants of a kernel; ``high``: queries of a block in half precision."""
    narrow = q.dtype != torch.float32
    return dict(
        HAS_BIAS=bias is not None,
        HAS_KEY_BIAS=key_bias is not None,
        D=max(triton.next_power_of_2(q.shape[-1]), 16),
        M=high if narrow else 32,
        N=64 if narrow else 32,
        PRECISION="tf32" if narrow else "ieee",
        num_warps=4,
        num_stages=2,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if not _takes(q, k, v):
        return plain_attend(q, k, v, bias, key_bias)
    b, r, queries, h, d = q.shape
    (q, q_strides), (k, k_strides), (v, v_strides) = _rows(q), _rows(k), _rows(v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(b, r, h, queries, dtype=torch.float32, device=q.device)
    settings = _settings(q, bias, key_bias, 128)
    launch(
        _attend,
        (cdiv(queries, settings["M"]) * b * r * h,),
        q,
        q,
        k,
        v,
        *_masks(bias, key_bias, q),
        out,
        lse,
        _LOG2_E / math.sqrt(d),
        b * r,
        r,
        h,
        queries,
        k.shape[2],
        d,
        *q_strides,
        *k_strides,
        *v_strides,
        **settings,
    )
    return out, lse


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if not _takes(q, k, v, dout):
        return plain_gradients(dout, q, k, v, bias, key_bias, out, lse, with_bias)
    b, r, queries, h, d = q.shape
    keys = k.shape[2]
    (q, q_strides), (k, k_strides), (v, v_strides) = _rows(q), _rows(k), _rows(v)
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    delta = torch.empty_like(lse)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    masks, scale = _masks(bias, key_bias, q), _LOG2_E / math.sqrt(d)
    strides = (*q_strides, *k_strides, *v_strides)
    settings = _settings(q, bias, key_bias, 64)
    high, wide = cdiv(queries, settings["M"]), cdiv(keys, settings["N"])
    sizes = (b * r, r, h, queries, keys, d)
    launch(_dq, (high * b * r * h,), q, q, k, v, *masks, out, lse, dout, delta, dq, scale, *sizes, *strides, **settings)
    launch(_dkv, (wide * b * r * h,), q, q, k, v, *masks, lse, dout, delta, dk, dv, scale, *sizes, *strides, **settings)
    if not with_bias or bias is None:
        return dq, dk, dv, None
    # Few tiles would leave multiprocessors idle: the rows are then split, and the parts added.
    tiles = high * wide * b * h
    splits = max(1, min(r, programs(tiles * r, q) // tiles))
    parts = torch.empty(splits, *bias.shape, dtype=torch.float32, device=q.device)
    sizes = (b, r, h, queries, keys, d)
    launch(
        _dbias,
        (tiles * splits,),
        q,
        q,
        k,
        v,
        *masks,
        lse,
        dout,
        delta,
        parts,
        scale,
        *sizes,
        splits,
        *strides,
        **settings,
    )
    return dq, dk, dv, parts.sum(0).to(bias.dtype) if splits > 1 else parts[0].to(bias.dtype)
