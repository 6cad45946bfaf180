"""Integer arithmetic behind "the sizes that would work": exact roots, divisors, balanced factorisations."""

from __future__ import annotations

import math

_TRIED_DIVISORS = 4096  # messages need a few small factors; a size of 10**18 must not hang the parser


def root(number: int, degree: int) -> int:
    """Return the largest whole r with ``r ** degree <= number``, exactly, for number >= 0 and degree >= 1."""
    if degree == 1:
        return number
    if degree == 2:
        return math.isqrt(number)
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle)
    return low


def is_power(number: int, degree: int) -> bool:
    """Tell whether ``number`` is a whole number to the power ``degree``: a square, a cube, ..."""
    base: int = root(number, degree)
    return math.prod([base] * degree) == number


def powers_near(number: int, degree: int) -> tuple[int, ...]:
    """Return the perfect powers just below (if any) and just above a number that is not one itself."""
    below = root(number, degree)
    return tuple(base**degree for base in (below, below + 1) if base >= 1)


def divisors(number: int) -> list[int]:
    """Divisors in rising order; beyond 16 million (4096 squared) only those with a small partner."""
    small = [d for d in range(1, min(math.isqrt(number), _TRIED_DIVISORS) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def balanced(number: int, parts: int) -> tuple[int, ...]:
    """Return ``number`` as ``parts`` factors as equal as its divisors allow: 12 as (3, 4) or (2, 2, 3)."""
    if parts == 1:
        return (number,)
    first = max(d for d in divisors(number) if d <= root(number, parts))
    return (first, *balanced(number // first, parts - 1))
