"""Products of one row with a weight in bfloat16, read in words of eight bytes; in Triton.

A thread has a word of each of a program's rows: 4 weights. It sums what belongs to a word first, so it keeps one sum a row, and the
words of its next step are on their way while it computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshfold.kernels.one_shot_packets_triton import begin_next, epoch_to_send, send


@triton.jit
def finish(
    total,
    other,
    squares,
    bias,
    bias2,
    add,
    y,
    row,
    inside,
    n,
    k,
    eps,
    addresses,
    epoch,
    slot,
    most,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    EPOCH_BYTES: tl.constexpr,
    BN: tl.constexpr,
):
    """Write outputs, or send them to RANKS ranks: the norm's factor, bias, gate and residual of the sums of some rows."""
    if NORM:
        rstd = 1.0 / tl.sqrt(squares / k + eps)
        total *= rstd
        other *= rstd
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            other += tl.load(bias2 + row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * other
    if ADD:
        total += tl.load(add + row, mask=inside, other=0.0).to(tl.float32)
    if RANKS:
        words = n // (32 // y.dtype.element_ty.primitive_bitwidth)
        send(total, y, addresses, epoch, slot, most, words, EPOCH_BYTES, RANK, RANKS, BN)
    else:
        tl.store(y + row, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _half_of(two, i: tl.constexpr):
    """Return one of two bfloat16 in a word of 32 bits in float32, whose upper half they are."""
    return (two & -65536 if i % 2 else two << 16).to(tl.float32, bitcast=True)


@triton.jit
def _four(x, at, there):
    """Load four elements in bfloat16 from the ``at``-th four on."""
    if x.dtype.element_ty == tl.bfloat16:
        found = tl.load(x.to(tl.pointer_type(tl.int64)) + at, mask=there, other=0)
    else:
        found = at
    return found


@triton.jit
def _of_four(x, four, at, there, i: tl.constexpr):
    """Return element i of the ``at``-th four in float32."""
    if x.dtype.element_ty == tl.bfloat16:
        found = _half_of((four >> 32).to(tl.int32) if i > 1 else four.to(tl.int32), i)
    else:
        found = tl.load(x + at * 4 + i, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["slot"], do_not_specialize_on_alignment=["w", "w2"])
def product_words(
    x,
    w,
    w2,
    bias,
    bias2,
    gain,
    add,
    y,
    n,
    k,
    w_row,
    eps,
    addresses,
    slot,
    most,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    EARLY: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    EPOCH_BYTES: tl.constexpr,
):
    """Multiply by a weight, BC words at a time.

    Threads must lie along a row, each with one word. Where addresses are multiples of 16 the compiler gives a thread two, so it
    does not know that they are.
    """
    words = k // 4
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < n
    word = tl.arange(0, BC)
    wide = row.to(tl.int64)[:, None]
    start = wide * w_row + word[None, :]
    mask = inside[:, None] & (word < words)[None, :]
    ahead = tl.load(w + start, mask=mask, other=0, eviction_policy="evict_first")
    ahead2 = ahead
    if GATED:
        ahead2 = tl.load(w2 + start, mask=mask, other=0, eviction_policy="evict_first")
    if EARLY:  # what the kernel before has written is read from here on
        begin_next(RANKS)
    epoch = 0
    if RANKS:  # loaded now, so that it is here when outputs are sent
        epoch = epoch_to_send(addresses, slot, most, RANK)
    acc = tl.zeros((BN, BC), tl.float32)
    acc2 = tl.zeros((BN, BC), tl.float32)
    squares = tl.zeros((BC,), tl.float32)
    for at in range(0, words, BC):
        here = at + word
        there = here < words
        weights, weights2 = ahead, ahead2
        next = here + BC
        place = wide * w_row + next[None, :]
        mask = inside[:, None] & (next < words)[None, :]
        if GATED:
            ahead2 = tl.load(w2 + place, mask=mask, other=0, eviction_policy="evict_first")
        ahead = tl.load(w + place, mask=mask, other=0, eviction_policy="evict_first")
        part = tl.zeros((BN, BC), tl.float32)
        part2 = tl.zeros((BN, BC), tl.float32)
        four = _four(x, here, there)
        gains = four
        if NORM:
            gains = _four(gain, here, there)
        for j in tl.static_range(4):
            given = _of_four(x, four, here, there, j)
            if NORM:
                squares += given * given
                given *= _of_four(gain, gains, here, there, j)
            part += _half_of((weights >> (32 * (j // 2))).to(tl.int32), j) * given[None, :]
            if GATED:
                part2 += _half_of((weights2 >> (32 * (j // 2))).to(tl.int32), j) * given[None, :]
        acc += part
        acc2 += part2
    finish(
        tl.sum(acc, 1),
        tl.sum(acc2, 1),
        tl.sum(squares, 0),
        bias,
        bias2,
        add,
        y,
        row,
        inside,
        n,
        k,
        eps,
        addresses,
        epoch,
        slot,
        most,
        NORM,
        GATED,
        BIAS,
        ADD,
        RANKS,
        RANK,
        EPOCH_BYTES,
        BN,
    )
