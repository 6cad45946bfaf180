"""Products of one row with codes of four or eight bits in whole numbers, read in words of eight bytes; in Triton.

A thread has a word of each of a program's rows: 16 codes of four bits, or 8 of eight. The elements of the row that belong to a word
become whole numbers of 16 bits, by the power of two that the largest of them allows; what is rounded off is at most 2^-15 of the
largest. A GPU multiplies two of them by two codes and adds up in one instruction (``dp2a``). Four bits of a code are taken out of
eight codes at a time. So a weight takes about 1.5 instructions, where a float for each takes more than three.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshfold.kernels.one_shot_packets_triton import begin_next, epoch_to_send
from meshfold.kernels.row_words_triton import finish

_BELOW = tl.constexpr(1 - 2.0**-8)  # so that 2^15 times it, rounded, is a whole number of 16 bits with a sign
# The last bits of this plus a small number are that number, rounded, as two's complement.
_ROUND = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _with(values, value):
    """Return a tuple with one more."""
    values += (value,)
    return values


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
def _pair(first, second, ASM: tl.constexpr):
    """Return the lower halves of two words of 32 bits in one."""
    if ASM:
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = (first & 0xFFFF) | (second << 16)
    return found


@triton.jit
def _dot(pair, codes, total, HIGH: tl.constexpr, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """Add the products of a pair of whole numbers with the two lower, or higher, bytes of a word of 32 bits."""
    if not ASM:
        found = total
        for i in tl.static_range(2):
            code = (codes >> (16 * HIGH + 8 * i)) & 0xFF
            code = (code ^ 128) - 128 if SIGNED else code
            found += (pair >> 16 if i else (pair << 16) >> 16) * code
    else:
        kind: tl.constexpr = ("dp2a.hi" if HIGH else "dp2a.lo") + (".s32.s32" if SIGNED else ".s32.u32")
        found = tl.inline_asm_elementwise(
            kind + " $0, $1, $2, $3;", "=r,r,r,r", [pair, codes, total], dtype=tl.int32, is_pure=True, pack=1
        )
    return found


@triton.jit
def _fours(x, word, WORDS: tl.constexpr, PER: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr):
    """Load the PER elements of 16 bits that belong to each word, four in 64 bits; beyond the last word, those of the last."""
    if not WHOLE:
        word = tl.minimum(word, WORDS - 1)
    address = (x + word * PER).to(tl.int64)
    found = ()
    for i in tl.static_range(PER // 8):
        first, second = _two(address + 16 * i, ASM)
        found = _with(_with(found, first), second)
    return found


@triton.jit
def _floats(x, fours):
    """Return elements in float32; ``x`` points to their dtype."""
    found = ()
    for i in tl.static_range(len(fours)):
        for half in tl.static_range(2):
            two = (fours[i] >> (32 * half)).to(tl.int32)
            if x.dtype.element_ty == tl.bfloat16:  # the upper half of float32
                found = _with(found, (two << 16).to(tl.float32, bitcast=True))
                found = _with(found, (two & -65536).to(tl.float32, bitcast=True))
            else:
                found = _with(found, two.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
                found = _with(found, (two >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
    return found


@triton.jit
def _normed(elements, gains, squares):
    """Return elements times gains, and the squares of the elements added up."""
    found = ()
    for i in tl.static_range(len(elements)):
        squares = tl.fma(elements[i], elements[i], squares)
        found = _with(found, elements[i] * gains[i])
    return found, squares


@triton.jit
def _rounded(element, factor):
    """Return the product as a whole number, in the lower half of a word of 32 bits."""
    return tl.fma(element, factor, _ROUND).to(tl.int32, bitcast=True)


@triton.jit
def _whole_numbers(elements, BITS: tl.constexpr, ASM: tl.constexpr):
    """Return the elements of a word as whole numbers, in pairs; their sum; and what one is worth, but for ``_BELOW``."""
    largest = tl.abs(elements[0])
    for i in tl.static_range(1, len(elements)):
        largest = tl.maximum(largest, tl.abs(elements[i]), propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    worth = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    worth = tl.where(exponent == 255, float("nan"), worth)  # an infinity, or not a number
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True) * _BELOW
    pairs = ()
    if BITS == 4:  # out of half a word come the codes with even numbers, then those with odd ones
        for half in tl.static_range(2):
            for odd in tl.static_range(2):
                for high in tl.static_range(2):
                    low = _rounded(elements[8 * half + 4 * high + odd], factor)
                    pairs = _with(pairs, _pair(low, _rounded(elements[8 * half + 4 * high + odd + 2], factor), ASM))
    else:
        for i in tl.static_range(4):
            pairs = _with(pairs, _pair(_rounded(elements[2 * i], factor), _rounded(elements[2 * i + 1], factor), ASM))
    total = tl.zeros(largest.shape, tl.int32)
    for i in tl.static_range(len(pairs)):
        total = _dot(pairs[i], tl.full(largest.shape, 0x0101, tl.int32), total, False, False, ASM)
    return pairs, total, worth


@triton.jit
def _products(codes, pairs, start, BITS: tl.constexpr, ASM: tl.constexpr):
    """Add to ``start`` the products of whole numbers with the codes of each word; times 16 for codes of four bits."""
    total = start
    shifted = tl.zeros(codes.shape, tl.int32)  # of odd codes of four bits, each times 16
    for i in tl.static_range(2):
        half = (codes >> (32 * i)).to(tl.int32)
        if BITS == 4:
            even, odd = half & 0x0F0F0F0F, half & -0x0F0F0F10
            for high in tl.static_range(2):
                total = _dot(pairs[4 * i + high][None, :], even, total, high, False, ASM)
                shifted = _dot(pairs[4 * i + 2 + high][None, :], odd, shifted, high, False, ASM)
        else:
            for high in tl.static_range(2):
                total = _dot(pairs[2 * i + high][None, :], half, total, high, True, ASM)
    return total * 16 + shifted if BITS == 4 else total


@triton.jit
def _codes_of(w, at, mask, WHOLE: tl.constexpr):
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
    """Return the row's part of words as whole numbers in pairs, their sum, what one is worth, and squares added up."""
    elements = _floats(x, fours)
    if NORM:
        elements, squared = _normed(elements, _floats(gain, gains), tl.zeros(there.shape, tl.float32))
        squares += squared if WHOLE else tl.where(there, squared, 0.0)
    pairs, total, worth = _whole_numbers(elements, BITS, ASM)
    return pairs, total, worth, squares


@triton.jit
def _add_words(
    acc,
    codes,
    scales,
    zero,
    share,
    there,
    pairs,
    total,
    worth,
    WHOLE: tl.constexpr,
    SHARE: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of words to the sums of a program's rows; codes, scales and zero points that are not there are 0."""
    start = _start(zero, share, there, total, WHOLE, ZERO, BITS)
    sums = _products(codes, pairs, start, BITS, ASM).to(tl.float32)
    return tl.fma(sums, scales * worth[None, :] if SHARE else tl.broadcast_to(worth[None, :], sums.shape), acc)


@triton.jit(do_not_specialize=["slot"], do_not_specialize_on_alignment=["w", "w2", "scale", "scale2", "zero", "zero2"])
def product_codes(
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
    """Multiply by codes with a scale of each row (SHARE 0), or of each SHARE words; BC words at a time, of rows of WORDS.

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
    codes = _codes_of(w, place, there[None, :], FULL)
    codes2 = codes
    scales = tl.full((BN, BC), 1.0, tl.float32)
    scales2 = scales
    gains = ()
    if GATED:
        codes2 = _codes_of(w2, place, there[None, :], FULL)
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
        next_codes = _codes_of(w, place + at, there[None, :], WHOLE)
        next_codes2 = next_codes
        next_share = _group_at(rows, column, at, GROUPS, WORDS_A_SCALE, BC)
        next_scales, next_scales2 = scales, scales2
        if GATED:
            next_codes2 = _codes_of(w2, place + at, there[None, :], WHOLE)
        if SHARE:
            next_scales = _of_groups(scale, next_share, there[None, :], WHOLE).to(tl.float32)
            if GATED:
                next_scales2 = _of_groups(scale2, next_share, there[None, :], WHOLE).to(tl.float32)
        pairs, total, worth, squares = _row_part(x, gain, fours, gains, squares, there, NORM, True, BITS, ASM)
        fours = _fours(x, at + column, WORDS, PER, WHOLE, ASM)
        if NORM:
            gains = _fours(gain, at + column, WORDS, PER, WHOLE, ASM)
        acc = _add_words(acc, codes, scales, zero, share, there, pairs, total, worth, True, SHARE, ZERO, BITS, ASM)
        if GATED:
            acc2 = _add_words(
                acc2, codes2, scales2, zero2, share, there, pairs, total, worth, True, SHARE, ZERO, BITS, ASM
            )
        codes, codes2, share, scales, scales2 = next_codes, next_codes2, next_share, next_scales, next_scales2
    there = (STEPS - 1) * BC + column < WORDS
    pairs, total, worth, squares = _row_part(x, gain, fours, gains, squares, there, NORM, WHOLE, BITS, ASM)
    acc = _add_words(acc, codes, scales, zero, share, there, pairs, total, worth, WHOLE, SHARE, ZERO, BITS, ASM)
    if GATED:
        acc2 = _add_words(
            acc2, codes2, scales2, zero2, share, there, pairs, total, worth, WHOLE, SHARE, ZERO, BITS, ASM
        )
    worth_of_all: tl.constexpr = 1 / (_BELOW * (16 if BITS == 4 else 1))
    total, other = tl.sum(acc, 1) * worth_of_all, tl.sum(acc2, 1) * worth_of_all
    if not SHARE:
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
