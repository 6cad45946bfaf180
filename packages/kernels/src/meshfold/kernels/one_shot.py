"""Sum of a few rows over ranks that reach each other's memory, fused with the residual add and the RMSNorm after it.

    total = sum of x over ranks;  stream' = stream + total;  y = rms_norm(stream') * gain

It returns y, and total or stream': total for code that adds the stream itself.

Each rank writes its rows to memory that its peers can read, raises a flag in theirs, waits for theirs, and adds all parts in the
order of the ranks, so all get the same bits. That is one step over the links, where a ring takes ``2 (ranks - 1)``. It sends
``(ranks - 1)`` times the rows, so it is for few of them (:func:`one_shot_rows`).

Slots keep a rank from writing rows that a slower one still reads: a call may use any slot but that of the call before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.kernels.inputs import compute_dtype

SLOTS = 3
"""slots of the memory: the first call of a token has the first, further ones take turns with the others"""

_MOST_BYTES, _MOST_ROWS, _MOST_COLUMNS, _MOST_RANKS = 512 * 1024, 64, 32768, 8
_ALIGNED = 256


class OneShotMemory(NamedTuple):
    """Memory of every rank: flags, then slots of rows.

    Attributes:
        addresses: int64 ``ranks`` on the device, of each rank's memory as this one maps it. It begins as zeros.
        rank: this one's place.
        rows: of a slot.
        columns: of a row.
        dtype: of the rows.
    """

    addresses: Tensor
    rank: int
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def flag_bytes(self) -> int:
        """Bytes of the flags."""
        return _flag_bytes(self.rows, self.addresses.numel())

    def check(self, x: Tensor) -> None:
        """Refuse rows without room.

        Raises:
            ValueError: for more rows, other columns or another dtype.
        """
        if x.shape[0] > self.rows or x.shape[1] != self.columns or x.dtype != self.dtype:
            raise ValueError(
                f"{tuple(x.shape)} of {x.dtype}: the memory is for at most {self.rows} rows of {self.columns} elements of "
                f"{self.dtype}"
            )


def one_shot_rows(columns: int, itemsize: int, ranks: int) -> int:
    """Return how many rows are summed in one shot at most; 0 where another way is faster, or the kernel does not reach.

    Args:
        columns: elements of a row.
        itemsize: bytes of an element.
        ranks: of one machine, that sum.
    """
    if not 2 <= ranks <= _MOST_RANKS or columns > _MOST_COLUMNS:
        return 0
    return min(_MOST_BYTES // (columns * itemsize * (ranks - 1)), _MOST_ROWS)


def one_shot_bytes(rows: int, columns: int, itemsize: int, ranks: int) -> int:
    """Return the bytes of each rank's memory."""
    return _flag_bytes(rows, ranks) + SLOTS * rows * columns * itemsize


def one_shot_slot(call: int) -> int:
    """Return the slot of a token's call, counted from 0. A token with two calls or more never repeats one, nor do two tokens."""
    return 0 if call == 0 else 2 - call % 2


def sum_add_norm(
    parts: Sequence[Tensor], stream: Tensor, gain: Tensor, eps: float, *, adds: bool = False
) -> tuple[Tensor, Tensor]:
    """Sum parts, add the stream and normalise: the formulas of the kernel in plain torch.

    Args:
        parts: of each rank, in their order, ``rows h``; or their sum alone.
        stream: ``rows h``.
        gain: ``h``.
        eps: of the norm.
        adds: return the new stream, not the total.

    Returns:
        total or the new stream, and y: ``rows h`` in the dtype of the parts. Sums are in float32 (float64 for float64) and rounded
        once to total; the new stream is rounded before its norm, as if it was computed by itself.
    """
    wide = compute_dtype(parts[0])
    total = torch.stack([part.to(wide) for part in parts]).sum(0).to(parts[0].dtype)
    summed = (stream.to(wide) + total.to(wide)).to(stream.dtype)
    y = F.rms_norm(summed.to(wide), summed.shape[-1:], gain.to(wide), eps).to(total.dtype)
    return summed if adds else total, y


def one_shot_sum(
    x: Tensor, stream: Tensor, gain: Tensor, eps: float, memory: OneShotMemory, slot: int, *, adds: bool = False
) -> tuple[Tensor, Tensor]:
    """Sum rows over ranks, add the stream and normalise, by one Triton kernel; all ranks must call in the same order.

    Args:
        x: ``rows h``, this rank's part.
        stream, gain, eps: as of :func:`sum_add_norm`; the same on all ranks.
        memory: with room for the rows.
        slot: another one than that of the call before.
        adds: as of :func:`sum_add_norm`.

    Returns:
        What :func:`sum_add_norm` returns.

    Raises:
        ValueError: for rows that the memory has no room for.
    """
    memory.check(x)
    from meshfold.kernels.one_shot_triton import launch_one_shot  # which needs Triton

    return launch_one_shot(x, stream, gain, eps, memory, slot, adds=adds)


def _flag_bytes(rows: int, ranks: int) -> int:
    return -(-SLOTS * rows * ranks * 4 // _ALIGNED) * _ALIGNED
