"""The interface of a transport: memory that the peers of a group can write, flags in it, and two more streams."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

FLAG_BYTES = 4096
"""Room for the flags behind the slots."""

Stream = Literal["send", "receive"]
"""A stream of a transport in addition to the current one."""

STREAMS: tuple[Stream, ...] = get_args(Stream)

MOST_RANKS = FLAG_BYTES // 4 // 3  # two flags a rank, and one to try them out


class Transport(Protocol):
    """Memory, flags and streams of a :class:`~meshfold.mesh.collectives.push.channel.Channel`.

    All but ``memory`` queue work on the current stream, and return at once on a GPU; on a CPU they are done when they return.

    Attributes:
        index: this rank's place in the group.
        size: ranks of the group.
        slot_bytes: bytes of each slot.
    """

    index: int
    size: int
    slot_bytes: int

    def memory(self, rank: int, slot: int) -> Tensor:
        """Return a slot of a rank's memory as bytes, ``[slot_bytes]``; what is written there is written in that rank's memory."""
        ...

    def write(self, rank: int, slot: int, start: int, block: Tensor, first: int, length: int) -> None:
        """Copy bytes ``first`` to ``first + length`` of a contiguous block to a slot of a rank's memory, from ``start`` on."""
        ...

    def read(self, slot: int, start: int, out: Tensor, first: int, length: int) -> None:
        """Copy bytes of this rank's own slot, from ``start`` on, to bytes ``first`` to ``first + length`` of contiguous memory."""
        ...

    def copy(self, block: Tensor, out: Tensor, first: int) -> None:
        """Copy a contiguous block of this rank to bytes of contiguous memory from ``first`` on."""
        ...

    def raise_flag(self, rank: int, place: int, number: int) -> None:
        """Set a flag in a rank's memory, after what was queued before."""
        ...

    def await_flag(self, place: int, number: int) -> None:
        """Make work that is queued from now on wait until a flag in this rank's memory has reached a call or a later one."""
        ...

    def follow(self, *streams: Stream) -> None:
        """Make work that is queued on the transport's streams from now on wait for the current work of the current stream."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Queue the transport's operations inside on a stream of its own. Torch's stay on the current stream."""
        ...

    def handle(self) -> int | None:
        """Return the handle of the stream that operations go to, for the launch of a kernel; None on a CPU."""
        ...

    def mark(self) -> torch.cuda.Event | None:
        """Return the point that the current stream has reached; None on a CPU."""
        ...

    def after(self, point: torch.cuda.Event | None) -> None:
        """Make work that is queued on the current stream from now on wait for a point."""
        ...
