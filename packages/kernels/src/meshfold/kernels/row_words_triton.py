"""Products of one row with a weight in bfloat16, or with its codes, read in words of eight bytes; in Triton.

A thread has a word of each of a program's rows: 4 weights, 8 codes of eight bits or 16 of four. It keeps one sum a row. The words,
scales and part of the row of its next step are on their way while it computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshfold.kernels.one_shot_packets_triton import begin_next, epoch_to_send, send
from meshfold.kernels.row_codes_triton import products, unit, whole_numbers, with_one


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
def _two(address, ASM: tl.constexpr):
    """Load 16 bytes as two words of 64 bits."""
    if ASM:
        first, second = tl.inline_asm_elementwise(
            "ld.global.v2.b64 {$0, $1}, [$2];",
            "=l,=l,l",
            [address],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )
    else:
        at = address.to(tl.pointer_type(tl.int64))
        first, second = tl.load(at), tl.load(at + 1)
    return first, second


@triton.jit
def _fours(x, word, WORDS: tl.constexpr, PER: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr):
    """Load the PER elements of 16 bits that belong to each word, four in 64 bits; beyond the last word, 0 or those of the last."""
    found = ()
    if PER == 4:
        there = x.to(tl.pointer_type(tl.int64)) + word
        found = with_one(found, tl.load(there) if WHOLE else tl.load(there, mask=word < WORDS, other=0))
    else:
        address = (x + (word if WHOLE else tl.minimum(word, WORDS - 1)) * PER).to(tl.int64)
        for i in tl.static_range(PER // 8):
            first, second = _two(address + 16 * i, ASM)
            found = with_one(with_one(found, first), second)
    return found


@triton.jit
def _floats(x, fours):
    """Return elements in float32; ``x`` points to their dtype."""
    found = ()
    for i in tl.static_range(len(fours)):
        for half in tl.static_range(2):
            two = (fours[i] >> (32 * half)).to(tl.int32)
            if x.dtype.element_ty == tl.bfloat16:
                found = with_one(with_one(found, _half_of(two, 0)), _half_of(two, 1))
            else:
                found = with_one(found, two.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
                found = with_one(found, (two >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
    return found


@triton.jit
def _normed(elements, gains, squares):
    """Return elements times gains, and the squares of the elements added up."""
    found = ()
    for i in tl.static_range(len(elements)):
        squares = tl.fma(elements[i], elements[i], squares)
        found = with_one(found, elements[i] * gains[i])
    return found, squares


@triton.jit
def _words_of(w, at, mask, WHOLE: tl.constexpr):
    if WHOLE:
        found = tl.load(w + at, eviction_policy="evict_first")
    else:
        found = tl.load(w + at, mask=mask, other=0, eviction_policy="evict_first")
    return found


@triton.jit
def _of_groups(values, at, mask, WHOLE: tl.constexpr):
    if WHOLE:
        found = tl.load(values + at)
    else:
        found = tl.load(values + at, mask=mask, other=0)
    return found


@triton.jit
def _group_at(rows, column, at, GROUPS: tl.constexpr, SHARE: tl.constexpr, BC: tl.constexpr):
    """Return where the scale of each word is; SHARE words share one."""
    if BC % SHARE == 0:  # a part of it that the compiler can take out of the loop
        found = tl.max_contiguous(rows * GROUPS + (column // SHARE)[None, :], (1, BC)) + at // SHARE
    else:
        found = tl.max_contiguous(rows * GROUPS + ((at + column) // SHARE)[None, :], (1, BC))
    return found


@triton.jit
def _start(zero, at, mask, total, WHOLE: tl.constexpr, ZERO: tl.constexpr, BITS: tl.constexpr):
    """Return what takes the zero points out of the products of words: minus the zero point times the row's sum."""
    if ZERO:
        found = -_of_groups(zero, at, mask, WHOLE).to(tl.int32) * total[None, :]
    else:
        found = tl.broadcast_to((-8 * total if BITS == 4 else total * 0)[None, :], at.shape)
    return found


@triton.jit
def _row_part(
    x,
    gain,
    fours,
    gains,
    squares,
    there,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the elements of words, and squares added up; for codes as whole numbers in pairs, their sum, what one is worth."""
    elements = _floats(x, fours)
    if NORM:
        elements, squared = _normed(elements, _floats(gain, gains), tl.zeros(there.shape, tl.float32))
        squares += squared if WHOLE else tl.where(there, squared, 0.0)
    total, worth = 0, 0.0
    if BITS < 16:
        elements, total, worth = whole_numbers(elements, BITS, ASM)
    return elements, total, worth, squares


@triton.jit
def _add_words(
    acc,
    words,
    scales,
    zero,
    share,
    there,
    elements,
    total,
    worth,
    WHOLE: tl.constexpr,
    SHARE: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of words to the sums of a program's rows; codes, scales and zero points that are not there are 0."""
    if BITS == 16:
        for i in tl.static_range(4):
            weight = _half_of((words >> (32 * (i // 2))).to(tl.int32), i)
            acc = tl.fma(weight, elements[i][None, :], acc)
    else:
        start = _start(zero, share, there, total, WHOLE, ZERO, BITS)
        sums = products(words, elements, start, BITS, ASM).to(tl.float32)
        acc = tl.fma(sums, scales * worth[None, :] if SHARE else tl.broadcast_to(worth[None, :], sums.shape), acc)
    return acc


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
    eps,
    addresses,
    slot,
    most,
    WORDS: tl.constexpr,
    W_ROW: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    FITS: tl.constexpr,
    EARLY: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    EPOCH_BYTES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Multiply by a weight (BITS 16), or by codes with a scale of each row (SHARE 0), or of each SHARE words; BC words at a time.

    Sizes of a row are constants: addresses of a program's rows differ by constants then, which take no instructions. Threads must
    lie along a row, each with one word. Where addresses are multiples of 16 the compiler gives a thread two, so it does not know
    that they are. Scales are said to be contiguous so that the thread that has a word loads its scale. FITS: BN divides n.
    """
    PER: tl.constexpr = 64 // BITS
    WORDS_A_SCALE: tl.constexpr = SHARE if SHARE else WORDS
    STEPS: tl.constexpr = (WORDS + BC - 1) // BC
    WHOLE: tl.constexpr = WORDS % BC == 0
    FULL: tl.constexpr = WHOLE or STEPS > 1  # the first words are all there
    first = tl.program_id(0) * BN
    row = first + tl.arange(0, BN)
    inside = row < n
    start = first.to(tl.int64)
    w += start * W_ROW
    w2 += start * W_ROW
    scale += start * GROUPS
    scale2 += start * GROUPS
    zero += start * GROUPS
    zero2 += start * GROUPS
    rows = (tl.arange(0, BN) if FITS else tl.minimum(row, n - 1) - first)[:, None]
    column = tl.arange(0, BC)
    place = rows * W_ROW + column[None, :]
    share = _group_at(rows, column, 0, GROUPS, WORDS_A_SCALE, BC)
    there = column < WORDS
    words = _words_of(w, place, there[None, :], FULL)
    words2 = words
    scales = tl.full((BN, BC), 1.0, tl.float32)
    scales2 = scales
    gains = ()
    if GATED:
        words2 = _words_of(w2, place, there[None, :], FULL)
    if SHARE:
        scales = _of_groups(scale, share, there[None, :], FULL).to(tl.float32)
        if GATED:
            scales2 = _of_groups(scale2, share, there[None, :], FULL).to(tl.float32)
    if NORM:
        gains = _fours(gain, column, WORDS, PER, FULL, ASM)
    if EARLY:  # what the kernel before has written is read from here on
        begin_next(RANKS)
    epoch = 0
    if RANKS:  # loaded now, so that it is here when outputs are sent
        epoch = epoch_to_send(addresses, slot, most, RANK)
    fours = _fours(x, column, WORDS, PER, FULL, ASM)
    acc = tl.zeros((BN, BC), tl.float32)
    acc2 = tl.zeros((BN, BC), tl.float32)
    squares = tl.zeros((BC,), tl.float32)
    for step in range(STEPS - 1):  # what the next step reads is on its way
        at = (step + 1) * BC
        there = at + column < WORDS
        next_words = _words_of(w, place + at, there[None, :], WHOLE)
        next_words2 = next_words
        next_share = _group_at(rows, column, at, GROUPS, WORDS_A_SCALE, BC)
        next_scales, next_scales2 = scales, scales2
        if GATED:
            next_words2 = _words_of(w2, place + at, there[None, :], WHOLE)
        if SHARE:
            next_scales = _of_groups(scale, next_share, there[None, :], WHOLE).to(tl.float32)
            if GATED:
                next_scales2 = _of_groups(scale2, next_share, there[None, :], WHOLE).to(tl.float32)
        elements, total, worth, squares = _row_part(x, gain, fours, gains, squares, there, NORM, True, BITS, ASM)
        fours = _fours(x, at + column, WORDS, PER, WHOLE, ASM)
        if NORM:
            gains = _fours(gain, at + column, WORDS, PER, WHOLE, ASM)
        acc = _add_words(acc, words, scales, zero, share, there, elements, total, worth, True, SHARE, ZERO, BITS, ASM)
        if GATED:
            acc2 = _add_words(
                acc2, words2, scales2, zero2, share, there, elements, total, worth, True, SHARE, ZERO, BITS, ASM
            )
        words, words2, share, scales, scales2 = next_words, next_words2, next_share, next_scales, next_scales2
    there = (STEPS - 1) * BC + column < WORDS
    elements, total, worth, squares = _row_part(x, gain, fours, gains, squares, there, NORM, WHOLE, BITS, ASM)
    acc = _add_words(acc, words, scales, zero, share, there, elements, total, worth, WHOLE, SHARE, ZERO, BITS, ASM)
    if GATED:
        acc2 = _add_words(
            acc2, words2, scales2, zero2, share, there, elements, total, worth, WHOLE, SHARE, ZERO, BITS, ASM
        )
    total, other = tl.sum(acc, 1), tl.sum(acc2, 1)
    if BITS < 16:
        total *= unit(BITS)
        other *= unit(BITS)
    if BITS < 16 and SHARE == 0:
        total *= tl.load(scale + row - first, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            other *= tl.load(scale2 + row - first, mask=inside, other=0.0).to(tl.float32)
    finish(
        total,
        other,
        tl.sum(squares, 0),
        bias,
        bias2,
        add,
        y,
        row,
        inside,
        n,
        WORDS * PER,
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
