"""Products of a part of a row with codes of four or eight bits, in whole numbers; in Triton.

The elements of a row that belong to a word of codes become whole numbers of 16 bits, by the power of two that the largest of them
allows; what is rounded off is at most 2^-15 of the largest. A GPU multiplies two of them by two codes and adds up in one
instruction (``dp2a``). Four bits of a code are taken out of eight codes at a time. So a weight takes about 1.5 instructions, where
a float for each takes more than three. ASM: without it the same by shifts and masks, where there are no such instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

_BELOW = tl.constexpr(1 - 2.0**-8)  # so that 2^15 times it, rounded, is a whole number of 16 bits with a sign
# The last bits of this plus a small number are that number, rounded, as two's complement.
_ROUND = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def with_one(values, value):
    """Return a tuple with one more."""
    values += (value,)
    return values


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
def _rounded(element, factor):
    """Return the product as a whole number, in the lower half of a word of 32 bits."""
    return tl.fma(element, factor, _ROUND).to(tl.int32, bitcast=True)


@triton.jit
def whole_numbers(elements, BITS: tl.constexpr, ASM: tl.constexpr):
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
                    pairs = with_one(pairs, _pair(low, _rounded(elements[8 * half + 4 * high + odd + 2], factor), ASM))
    else:
        for i in tl.static_range(4):
            pairs = with_one(
                pairs, _pair(_rounded(elements[2 * i], factor), _rounded(elements[2 * i + 1], factor), ASM)
            )
    total = tl.zeros(largest.shape, tl.int32)
    for i in tl.static_range(len(pairs)):
        total = _dot(pairs[i], tl.full(largest.shape, 0x0101, tl.int32), total, False, False, ASM)
    return pairs, total, worth


@triton.jit
def products(codes, pairs, start, BITS: tl.constexpr, ASM: tl.constexpr):
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
def unit(BITS: tl.constexpr):
    """Return what sums of products are to be multiplied by, apart from what one whole number of each word is worth."""
    return 1.0 / (_BELOW * (16 if BITS == 4 else 1))
