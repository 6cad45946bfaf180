"""A channel: numbered calls in which each rank of a group pushes blocks into its peers' memory and reads what arrives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from meshfold.mesh.collectives.push import epochs
from meshfold.mesh.collectives.push.transport import Transport
from meshfold.mesh.errors import CollectiveError

_MOST_VIEWS = 256  # kept of a channel's slots


class Channel:
    """The calls of one group over one transport. All of its ranks make the same calls in the same order."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._number = 0
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}  # of slots as blocks

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self.transport.index

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.transport.size

    @property
    def block_bytes(self) -> int:
        """The largest block of a call: a slot has a row for each rank."""
        return self.transport.slot_bytes // self.size

    def begin(self, shape: Sequence[int], dtype: torch.dtype) -> Exchange:
        """Begin the next call.

        Args:
            shape: of every block of it.
            dtype: of every block of it.

        Raises:
            CollectiveError: if a block is larger than :attr:`block_bytes`.
        """
        exchange = Exchange(self, self._number + 1, tuple(shape), dtype)
        self._number += 1
        return exchange


class Exchange:
    """One call of a channel.

    Queue pushes before waits: a rank that waits for a block before it has queued its own pushes may keep its peers waiting.

    Attributes:
        number: of the call, from 1.
        shape, dtype: of every block.
    """

    def __init__(self, channel: Channel, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype
        self._transport, self._views = channel.transport, channel._views
        self._slot = epochs.slot_of(number)
        self._elements = 1
        for length in shape:
            self._elements *= length
        self._bytes = self._elements * dtype.itemsize
        self._last: torch.cuda.Event | None = None
        if self._bytes > channel.block_bytes:
            raise CollectiveError(
                f"a block of {shape} {dtype} has {self._bytes} bytes, and the channel has room for {channel.block_bytes} from each "
                f"of {channel.size} ranks: send it in pieces, or open a channel for larger blocks"
            )

    def push(self, target: int, block: Tensor, first: int = 0) -> None:
        """Start copying a block into this rank's row of the memory of ``target``, in parallel with compute.

        Args:
            target: the place of a rank in the group; this rank's own if it reads its block with the others'.
            block: contiguous memory that has the block.
            first: the element of it that the block begins at.
        """
        self._transport.follow("send")
        with self._transport.on("send"):
            self.write(target, block, first)
            self._last = self._transport.mark()

    def write(self, target: int, block: Tensor, first: int = 0) -> None:
        """Copy a block as :meth:`push` does, on the current stream."""
        self.write_runs(target, ((block, first, self._elements),))

    def write_runs(self, target: int, runs: Iterable[tuple[Tensor, int, int]]) -> None:
        """Copy a block that lies in several runs, as :meth:`write` does.

        ``runs``: of each contiguous memory, its first element, and the number of elements; together a block.
        """
        transport, size = self._transport, self.dtype.itemsize
        index = transport.index
        # The row's last reader is the target. Blocks of other calls may have other sizes: its own pushes wait, too.
        transport.await_flag(epochs.released(target, transport.size), epochs.call_before(self.number))
        place = index * self._bytes
        for block, first, elements in runs:
            transport.write(target, self._slot, place, block, first * size, elements * size)
            place += elements * size
        if target != index:
            transport.raise_flag(target, epochs.arrived(index), self.number)

    def read(self, source: int, out: Tensor, first: int = 0) -> None:
        """Let the current stream wait for the block of ``source``, and copy it out.

        Args:
            source: the place of another rank in the group.
            out: contiguous memory.
            first: the element of it that the block begins at.
        """
        self._transport.await_flag(epochs.arrived(source), self.number)
        self._transport.read(self._slot, source * self._bytes, out, first * self.dtype.itemsize, self._bytes)

    def arrive(self) -> None:
        """Let the current stream wait for the blocks of all other ranks."""
        for source in epochs.sources(self._transport.index, self._transport.size):
            self._transport.await_flag(epochs.arrived(source), self.number)

    def await_block(self, source: int) -> Tensor:
        """Let the current stream wait for the block of ``source``, and return it: a view that is valid until :meth:`release`."""
        if source != self._transport.index:
            self._transport.await_flag(epochs.arrived(source), self.number)
        start = source * self._bytes
        return self._own()[start : start + self._bytes].view(self.dtype).view(self.shape)

    def blocks(self) -> Tensor:
        """Return all rows of the slot, ``[ranks, *shape]``, in group order: a view, valid until :meth:`release`.

        The caller has waited for every block, and pushed its own to itself if it reads it here.
        """
        key = (self._slot, self.shape, self.dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            size = self._transport.size
            found = self._own()[: size * self._bytes].view(self.dtype).view(size, *self.shape)
            self._views[key] = found
        return found

    def _own(self) -> Tensor:
        return self._transport.memory(self._transport.index, self._slot)

    def release(self) -> None:
        """Tell the ranks that push here that the current stream has read their blocks; every call must."""
        transport = self._transport
        for writer in range(transport.size):
            transport.raise_flag(writer, epochs.released(transport.index, transport.size), self.number)

    @property
    def sent(self) -> torch.cuda.Event | None:
        """The end of the last push: the memory of the blocks may be reused after it. None on a CPU."""
        return self._last
