"""Products of one row with a weight, or with its codes, read in words of eight bytes; in Triton.

A thread has a word of each of a program's rows: 4 weights in bfloat16, 8 codes of eight bits or 16 of four. It sums what belongs
to a word first, so it keeps one sum a row, and the words of its next step are on their way while it computes. A code becomes a
float by one instruction: the bits of a small whole number c are the float ``c 2**-149``. The row takes the inverse factor.
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
def _level(half, BITS: tl.constexpr, i: tl.constexpr):
    """Return weight i of a word of 32 bits in float32; of codes ``code * 2**-149 * 2**(BITS i - shift)``."""
    if BITS == 16:
        found = _half_of(half, i)
    else:
        shift: tl.constexpr = 8 if BITS * (i + 1) > 24 else 0  # a float has the bits of whole numbers below 2**24
        mask: tl.constexpr = ((1 << BITS) - 1) << (BITS * i - shift)
        found = ((half >> shift) & mask).to(tl.float32, bitcast=True)
    return found


@triton.jit
def _raised(given, BITS: tl.constexpr, i: tl.constexpr):
    """Return an element of the row that weight i of a word is multiplied by; of codes times ``2**64 / 2**(BITS i - shift)``."""
    if BITS < 16:
        given *= 2.0 ** (64 - BITS * i + (8 if BITS * (i + 1) > 24 else 0))
    return given


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


@triton.jit
def _halves(codes, BITS: tl.constexpr):
    """Return the words of 32 bits of words of 64; codes of eight bits with 128 added."""
    low, high = codes.to(tl.int32), (codes >> 32).to(tl.int32)
    if BITS == 8:
        low, high = low ^ -2139062144, high ^ -2139062144
    return low, high


@triton.jit
def _middle(zero, group, mask, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Return what stands for 0 among the levels."""
    if ZERO:
        found = tl.load(zero + group, mask=mask, other=0).to(tl.float32) + (128.0 if BITS == 8 else 0.0)
    else:
        found = tl.full(group.shape, 128.0 if BITS == 8 else 8.0, tl.float32)
    return found


@triton.jit(do_not_specialize=["slot"], do_not_specialize_on_alignment=["w", "w2", "scale", "scale2", "zero", "zero2"])
def product_words(
    x,
    w,
    w2,
    scale,
    scale2,
    zero,
    zero2,
    bias,
    bias2,
    gain,
    add,
    y,
    n,
    k,
    w_row,
    groups,
    eps,
    addresses,
    slot,
    most,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
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
    """Multiply by a weight (GROUP 0), by codes with a scale of each row (GROUP 1), or of each group; BC words at a time.

    Threads must lie along a row, each with one word. Where addresses are multiples of 16 the compiler gives a thread two, so it
    does not know that they are. Scales are said to be contiguous so that the thread that has a word loads its scale.
    """
    PER: tl.constexpr = 64 // BITS
    words = k // PER
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
        low, high = _halves(ahead, BITS)
        low2, high2 = low, high
        next = here + BC
        place = wide * w_row + next[None, :]
        mask = inside[:, None] & (next < words)[None, :]
        if GATED:
            low2, high2 = _halves(ahead2, BITS)
            ahead2 = tl.load(w2 + place, mask=mask, other=0, eviction_policy="evict_first")
        ahead = tl.load(w + place, mask=mask, other=0, eviction_policy="evict_first")
        group = wide * groups + (here * PER // GROUP if GROUP > 1 else here * 0)[None, :]
        group = tl.max_contiguous(group, (1, BC))
        mask = inside[:, None] & there[None, :]
        if GROUP > 1:  # loaded now, so that they are here when the words are unpacked
            scales = tl.load(scale + group, mask=mask, other=0.0).to(tl.float32)
            if GATED:
                scales2 = tl.load(scale2 + group, mask=mask, other=0.0).to(tl.float32)
        part = tl.zeros((BN, BC), tl.float32)
        part2 = tl.zeros((BN, BC), tl.float32)
        whole = tl.zeros((BC,), tl.float32)
        for q in tl.static_range(PER // 4):
            fours = here * (PER // 4) + q
            four = _four(x, fours, there)
            gains = four
            if NORM:
                gains = _four(gain, fours, there)
            for j in tl.static_range(4):
                given = _of_four(x, four, fours, there, j)
                if NORM:
                    squares += given * given
                    given *= _of_four(gain, gains, fours, there, j)
                whole += given
                factor = _raised(given, BITS, (q * 4 + j) % (PER // 2))[None, :]
                half = high if q * 4 + j >= PER // 2 else low
                part += _level(half, BITS, (q * 4 + j) % (PER // 2)) * factor
                if GATED:
                    half = high2 if q * 4 + j >= PER // 2 else low2
                    part2 += _level(half, BITS, (q * 4 + j) % (PER // 2)) * factor
        if GROUP:
            part = part * (2.0**85) - _middle(zero, group, mask, BITS, ZERO) * whole[None, :]
            if GATED:
                part2 = part2 * (2.0**85) - _middle(zero2, group, mask, BITS, ZERO) * whole[None, :]
            if GROUP > 1:
                part *= scales
                if GATED:
                    part2 *= scales2
        acc += part
        acc2 += part2
    total, other = tl.sum(acc, 1), tl.sum(acc2, 1)
    if GROUP == 1:
        total *= tl.load(scale + row, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            other *= tl.load(scale2 + row, mask=inside, other=0.0).to(tl.float32)
    squared = tl.sum(squares, 0)
    finish(
        total,
        other,
        squared,
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
