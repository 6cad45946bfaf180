"""The protocol of pushes, without any tensor: numbers of calls, slots, flags, and the order of what each rank does.

The calls of a channel are numbered from 1, with the same numbers on all of its ranks. Call ``n`` uses slot ``n % 2`` of two. Each
rank has, in memory that its peers can write, one row a rank in each slot, and two flags a rank:

- ``arrived[s]``: the last call whose block rank ``s`` has written here. Raised by ``s``, after the block.
- ``released[r]``: the last call whose blocks rank ``r`` has read. Raised by ``r``; a writer looks at it before it writes.

A slot is written again two calls later, so a writer of call ``n`` waits until its reader has released call ``n − 2``: one
call behind, where it does not delay the reader. There is no barrier. Flags only grow, so nothing is ever reset.

No order of the streams makes the ranks wait for each other in a circle. Every wait of call ``n`` is for work that its peer has
queued earlier in the program: a push of call ``n`` before any read of it, or the release of call ``n − 2``. So a GPU that runs the
streams of a rank one after another, in program order, is not stuck either.

Flags are words of 32 bits that wrap around; they are compared by their distance, as ``cuStreamWaitValue32`` does.
"""

from __future__ import annotations

from collections.abc import Iterator

SLOTS = 2
"""Buffers that rotate: while one call's blocks are read, the next call's arrive."""

_WORD = 1 << 32


def word(number: int) -> int:
    """Return the flag of a call: its number in 32 bits. Calls up to 0 have always happened."""
    return number % _WORD


def is_reached(flag: int, number: int) -> bool:
    """Return True if a flag has reached a call or a later one; the two are less than 2³¹ calls apart."""
    return (flag - number) % _WORD < _WORD // 2


def slot_of(number: int) -> int:
    """Return the slot that a call uses."""
    return number % SLOTS


def call_before(number: int) -> int:
    """Return the call that used the same slot last, whose readers must have released it."""
    return number - SLOTS


def targets(index: int, size: int) -> Iterator[int]:
    """Yield the ranks to push to, in an order in which every rank receives from one rank at a time."""
    return ((index - step) % size for step in range(1, size))


def sources(index: int, size: int) -> Iterator[int]:
    """Yield the ranks whose blocks arrive, in the order in which :func:`targets` has them sent."""
    return ((index + step) % size for step in range(1, size))


def arrived(source: int) -> int:
    """Return the place of the flag that ``source`` raises when its block is here."""
    return source


def released(reader: int, size: int) -> int:
    """Return the place of the flag that ``reader`` raises when it has read what was pushed from here."""
    return size + reader
