"""The cost of a collective: bytes that one rank sends, by the ring algorithm.

The unit of every table, plan and record in Meshfold. With ``g`` ranks and a block of ``B`` bytes:

=============== ===================== =====================================
kind            bytes a rank moves    the block
=============== ===================== =====================================
all_gather      (g−1)/g · B           the gathered tensor
reduce_scatter  (g−1)/g · B           the tensor before it is scattered
all_reduce      2 (g−1)/g · B         the tensor
all_to_all      (g−1)/g · B           the local tensor
broadcast       B                     the tensor
shift           B                     the local tensor, sent to a neighbour
send            B                     the tensor; noted by the sender alone
=============== ===================== =====================================
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "shift", "send"]
KINDS: tuple[Kind, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "shift",
    "send",
)


def moved_bytes(kind: Kind, block_bytes: int | Fraction, group_size: int) -> Fraction:
    """Bytes one rank sends in a collective; exact, so that plans and records can be compared with ``==``.

    Args:
        kind: one of :data:`KINDS`.
        block_bytes: the size of the block that the table above names, in bytes.
        group_size: the number of ranks that take part.
    """
    if group_size == 1:
        return Fraction(0)
    if kind in ("broadcast", "shift", "send"):
        return Fraction(block_bytes)
    share = Fraction(group_size - 1, group_size) * block_bytes
    return 2 * share if kind == "all_reduce" else share
