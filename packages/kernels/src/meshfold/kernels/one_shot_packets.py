"""The one-shot sum of very few rows: data and flag arrive together, in one word of eight bytes.

The sum of :mod:`meshfold.kernels.one_shot` crosses the links twice: a rank raises flags after its rows are written, and reads its
peers' rows after their flags are there. Here each rank writes *packets* into its peers' memory, four bytes of data and the *epoch*
of the call in each, and waits until all packets in its own memory have this epoch. A store of eight bytes arrives whole, so nothing
orders data and flags, and rows cross once (the LL protocol of NCCL). It sends twice the bytes: :func:`packet_rows` says how many
rows it is for.

Memory of a rank::

    epochs   int32  slots rows parts             of the last call with a row of a slot; this rank's own
    packets  int64  slots ranks rows words       from each rank; 4 / itemsize elements a word

The product that makes a single row can send it (:func:`packet_product`): its programs write the packets of their outputs, to this
rank's memory too, and the sum finds them there.

A program sums a whole row where the norm follows, and a part of one where the products that read the row compute the norm
(:func:`packet_parts`). Each part has an epoch, since programs of a call end at different times; all parts of a row have the same
one between calls.

Epochs grow by one at each call and are in memory, so a CUDA graph that is replayed goes on with them. Slots are used as there: when
a rank writes, each peer has begun the call before, hence ended the call before that one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels.one_shot import SLOTS, OneShotMemory, one_shot_rows
from meshfold.kernels.row_product import RowWeight

_MOST_BYTES = 64 * 1024
_ALIGNED = 256
PARTS = 32
"""most programs that sum a row"""
_PART_WORDS = 256
PACKET_TRIES = 1 << 23
"""how often a check reads packets that do not come: about ten seconds"""


def packet_rows(columns: int, itemsize: int, ranks: int) -> int:
    """Return how many rows are summed by packets at most; 0 if none are.

    Args:
        columns: elements of a row.
        itemsize: bytes of an element.
        ranks: of one machine, that sum.
    """
    if itemsize not in (2, 4) or columns * itemsize % 4:
        return 0
    return min(one_shot_rows(columns, itemsize, ranks), _MOST_BYTES // (columns * itemsize))


def packet_parts(words: int) -> int:
    """Return into how many equal parts a row of so many words is split, up to its last, for a sum without the norm."""
    return -(-words // max(_PART_WORDS, 1 << (-(-words // PARTS) - 1).bit_length()))


def epoch_bytes(rows: int) -> int:
    """Return the bytes of the epochs, in whole units of alignment."""
    return -(-SLOTS * rows * PARTS * 4 // _ALIGNED) * _ALIGNED


def packet_bytes(rows: int, columns: int, itemsize: int, ranks: int) -> int:
    """Return the bytes of each rank's memory."""
    return epoch_bytes(rows) + SLOTS * ranks * rows * (columns * itemsize // 4) * 8


def packets_of(x: Tensor, epoch: int) -> Tensor:
    """Return the packets of rows in plain torch, int64 ``rows words``: the epoch in the upper half, data in the lower."""
    data = x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return data | (epoch << 32)


def rows_of(packets: Tensor, epoch: int, dtype: torch.dtype) -> Tensor | None:
    """Return the rows of packets; None if some have not the epoch yet."""
    if not bool((packets >> 32 == epoch).all()):
        return None
    low = packets & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32).view(dtype)


def packet_product(x: Tensor, layer: RowWeight, memory: OneShotMemory, slot: int) -> None:
    """Multiply one row by a weight, and send the product to all ranks as packets, for :func:`packet_sum`; by one Triton kernel.

    Args:
        x: of k elements in all.
        layer: a weight ``n k`` or its codes, of an even n.
        memory, slot: as of :func:`packet_sum`, which must be the next call with this memory.

    Raises:
        ValueError: for a row that the memory has no room for.
    """
    memory.check(torch.empty(1, layer.weight.shape[0], dtype=x.dtype, device="meta"))
    from meshfold.kernels.row_product_triton import product  # which needs Triton

    product(x, *layer, sends=(memory, slot))


def packet_sum(
    x: Tensor | None,
    stream: Tensor,
    gain: Tensor,
    eps: float,
    memory: OneShotMemory,
    slot: int,
    *,
    adds: bool = False,
    norm: bool = True,
    tries: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Sum rows over ranks, add the stream and normalise, by one Triton kernel; all ranks must call in the same order.

    Args:
        x: as of :func:`meshfold.kernels.one_shot_sum`, as are stream, gain, eps, slot and adds; None: a product has sent the row.
        memory: of :func:`packet_bytes`, which began as zeros.
        norm: False leaves the norm to whoever reads the sum. Several programs then sum a row, which takes less time.
        tries: how often packets are read before the kernel gives up, with a wrong result; 0: it waits.

    Returns:
        What :func:`meshfold.kernels.sum_add_norm` returns; None for the normed rows without the norm.

    Raises:
        ValueError: for rows that the memory has no room for.
    """
    memory.check(torch.empty(stream.shape, dtype=memory.dtype, device="meta") if x is None else x)
    from meshfold.kernels.one_shot_packets_triton import launch_packets  # which needs Triton

    return launch_packets(x, stream, gain, eps, memory, slot, adds=adds, norm=norm, tries=tries)
