"""The gradients of a chunk: collected while backward runs, summed over the group, kept as one shard.

Stage 1 of ZeRO collects the micro-steps of an accumulation in one flat tensor of the whole chunk and sums it over the
group once, at the last (1/N of the communication, N times the memory); stages 2 and 3 sum after every micro-step and
keep 1/N. Chunks are reduced in the same order on every rank, whatever order gradients come in.

A parameter that no rank used has no gradient, as in a single process. So that ranks which used different parameters
meet in the same collectives, what is missing counts as zero, and who was used is summed beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshfold.mesh import Pending, reduce_scatter
from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.transfer import beside, host_empty, mark, stream_of


class ChunkGradient:
    """Collects the gradients of one chunk.

    Attributes:
        shard: the sum over the group and over micro-steps of this rank's elements; None before there is one.
        used: places of the parameters that had a gradient on this rank since the last ``clear``.
    """

    def __init__(self, chunk: Chunk, dtype: torch.dtype, home: torch.device, *, every_time: bool) -> None:
        """Args:
        chunk: whose.
        dtype: in which gradients are summed.
        home: where the complete shard goes, once it is.
        every_time: reduce after every backward, not only after the last of an accumulation.
        """
        self.chunk, self.dtype, self.home = chunk, dtype, home
        self._every_time = every_time and chunk.group.size > 1
        self._whole: Tensor | None = None  # of the elements of all ranks, not reduced yet
        self._filled: set[int] = set()  # places that are in it
        self._arrived: set[int] = set()  # places whose gradient of this backward is there
        self._pending: Pending | None = None
        self._last = False
        self._host: Tensor | None = None  # where complete shards go; kept
        self._sent: torch.cuda.Event | None = None
        self._in_use: Callable[[], None] | None = None
        self.shard: Tensor | None = None
        self.used: set[int] = set()

    def begin(self) -> None:
        """Before the next backward."""
        self._arrived.clear()

    @property
    def is_full(self) -> bool:
        """Whether every parameter's gradient of this backward is there."""
        return len(self._arrived) == len(self.chunk.parameters)

    def add(self, place: int, gradient: Tensor) -> None:
        """Take up a gradient."""
        if self._pending is not None:  # a second gradient of one backward, after the first was sent
            self._collect()
        if self._whole is None:
            self._whole = torch.empty(self.chunk.spec.size_elems, dtype=self.dtype, device=self.chunk.device)
        slot = self.chunk.spec.slots[place]
        part = self._whole[slot.start_elems : slot.start_elems + slot.numel].view_as(gradient)
        if place in self._filled:
            part.add_(gradient)
        else:
            part.copy_(gradient)
            self._filled.add(place)
        self.used.add(place)
        self._arrived.add(place)

    def reduce(self, *, last: bool) -> None:
        """Start the sum over the group, if it is time. All of the group must call, in the same order of chunks."""
        if not (last or self._every_time):
            return
        self._last = last
        self._collect()
        whole = self._complete()
        if self.chunk.group.size == 1:
            self._whole = None
            self._filled.clear()
            self._keep(whole)
            return
        self._pending = reduce_scatter(whole, self.chunk.group, 0, async_op=True)
        self._whole = None
        self._filled.clear()

    def finish(self) -> Tensor:
        """After the last reduction: the complete shard, at home."""
        self._collect()
        if self.shard is None:
            raise ChunkError(f"{self.chunk}: its gradient was asked for before any backward")
        if self.shard.device.type != self.home.type:
            self._send(self.shard)
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None
        return self.shard

    def hand_over(self, until: Callable[[], None]) -> None:
        """Forget the shard, whose memory is somebody's ``until`` returns."""
        self._in_use = until

    def clear(self) -> None:
        """Forget everything."""
        self._pending = self._whole = self.shard = self._sent = None
        self._filled.clear()
        self._arrived.clear()
        self.used.clear()

    def _collect(self) -> None:
        if self._pending is None:
            return
        arrived = self._pending.wait()
        self._pending = None
        self._keep(arrived)

    def _keep(self, arrived: Tensor) -> None:
        """Add to the shard what was summed; the last of an accumulation goes home."""
        if self.shard is not None and self.shard.device == arrived.device:
            arrived = self.shard.add_(arrived)
        elif self.shard is not None:  # a second backward after the first one's gradient went home
            arrived = arrived.add_(self.shard.to(arrived.device))
        self.shard = arrived
        if self._last and arrived.device.type != self.home.type:
            self._send(arrived)

    def _send(self, shard: Tensor) -> None:
        """Copy a complete shard home while the device goes on."""
        if self._in_use is not None:
            self._in_use()
            self._in_use = None
        if self._host is None or self._host.dtype != shard.dtype:
            self._host = host_empty(shard.numel(), shard.dtype, self.home, shard.device)
        with beside(shard.device):
            self._host.copy_(shard, non_blocking=True)
            self._sent = mark(shard.device)
        if shard.is_cuda:
            shard.record_stream(stream_of(shard.device))
        self.shard = self._host

    def _complete(self) -> Tensor:
        """The whole chunk's gradient with zeros where there is none, padding included."""
        whole = self._whole
        if whole is None:
            return torch.zeros(self.chunk.spec.size_elems, dtype=self.dtype, device=self.chunk.device)
        end = 0
        for place, slot in enumerate(self.chunk.spec.slots):
            if place in self._filled:
                whole[end : slot.start_elems].zero_()
                end = slot.start_elems + slot.numel
        whole[end:].zero_()
        return whole
