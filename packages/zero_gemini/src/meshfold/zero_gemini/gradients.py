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
from meshfold.zero_gemini.arena import Block
from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.memory import Place
from meshfold.zero_gemini.transfer import beside, mark, queue_behind, stream_of


class ChunkGradient:
    """Collects the gradients of one chunk.

    Attributes:
        shard: the sum over the group and over micro-steps of this rank's elements; None before there is one.
        used: places of the parameters that had a gradient on this rank since the last ``clear``.
        measured: what ``measure`` said of the complete shard on the device, before it went home.
    """

    def __init__(
        self, chunk: Chunk, dtype: torch.dtype, home: Place, *, every_time: bool,
        measure: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """Args:
        chunk: whose.
        dtype: in which gradients are summed.
        home: where the optimizer's state is: complete shards go to that side.
        every_time: reduce after every backward, not only after the last of an accumulation.
        measure: a figure of the complete shard that will be wanted, and is had cheaply while the shard is on the device.
        """
        self.chunk, self.dtype, self.home = chunk, dtype, home
        self._wants_every_time, self._measure = every_time, measure
        self._last = False
        self.measured: Tensor | None = None
        self._whole: Block | None = None  # of the elements of all ranks, not reduced yet
        self._filled: set[int] = set()  # places that are in it
        self._arrived: set[int] = set()  # places whose gradient of this backward is there
        self._pending: Pending | None = None
        self._sending: Block | None = None  # what the pending reduction reads
        self._here: Block | None = None  # the shard, on the compute device
        self._host: Block | None = None  # the shard, at home: kept for the next step
        self._sent: torch.cuda.Event | None = None
        self._in_use: Callable[[], None] | None = None
        self._name = f"gradients of {chunk.spec.names[0]} to {chunk.spec.names[-1]}"
        self.shard: Tensor | None = None
        self.used: set[int] = set()

    @property
    def _every_time(self) -> bool:
        """Whole gradients do not wait on the device for the last micro-step if there is a better place for them."""
        return self._wants_every_time and (self.chunk.group.size > 1 or self.home != "device")

    def rehome(self, home: Place) -> None:
        """Complete shards go elsewhere from now on; after ``clear``, and after what was handed over is done with."""
        self._wait_for_user()
        if self._host is not None and home == "device":
            self._host.free()
            self._host = None
        self.home = home

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
            self.collect()
        if self._whole is None:
            self._whole = self.chunk.memory.allocate(
                self.chunk.spec.size_elems, self.dtype, "device", self._name
            )
        slot = self.chunk.spec.slots[place]
        part = self._whole.tensor[slot.start_elems : slot.start_elems + slot.numel].view_as(gradient)
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
        self.collect()
        self._last = last
        whole, self._whole = self._complete(), None
        self._filled.clear()
        if self.chunk.group.size == 1:
            self._keep(whole)
        else:
            self._pending = reduce_scatter(whole.tensor, self.chunk.group, 0, async_op=True)
            self._sending = whole

    def finish(self) -> Tensor:
        """After the last reduction: the complete shard, at home."""
        self.collect()
        if self.shard is None:
            raise ChunkError(f"{self.chunk}: its gradient was asked for before any backward")
        self._arrive()
        return self.shard

    def hand_over(self, until: Callable[[], None]) -> None:
        """Forget the shard, whose memory is somebody's ``until`` returns."""
        self._in_use = until

    def clear(self) -> None:
        """Forget everything."""
        self.collect()
        self._arrive()
        for block in (self._whole, self._here):
            if block is not None:
                block.free()
        self._whole = self._here = self.shard = self.measured = None
        self._filled.clear()
        self._arrived.clear()
        self.used.clear()

    def close(self) -> None:
        """Give all memory back."""
        self._wait_for_user()
        self.clear()
        if self._host is not None:
            self._host.free()
            self._host = None

    def collect(self) -> None:
        """End a reduction that is under way."""
        if self._pending is None or self._sending is None:
            return
        arrived = self._pending.wait()
        self._sending.free()
        self._pending = self._sending = None
        self._keep(self.chunk.memory.count(arrived, self._name))

    def _keep(self, arrived: Block) -> None:
        """Add to the shard what was summed, and send it home."""
        tensor = arrived.tensor
        if self._here is not None:
            tensor.add_(self._here.tensor)
            self._here.free()
        elif self.shard is not None:  # an earlier micro-step's, which went home
            tensor.add_(self._fetched())
        self._here, self.shard, self.measured = arrived, tensor, None
        if self.home != "device":
            if self._last:
                self.measured = self._measure(tensor)
            self._send(arrived)

    def _fetched(self) -> Tensor:
        """The shard that went home, on the compute device again."""
        assert self.shard is not None  # the caller looked
        device = self.chunk.device
        with beside(device):
            earlier = self.shard.to(device, non_blocking=True)
            there = mark(device)
        queue_behind(there, device)
        if earlier.is_cuda:
            earlier.record_stream(torch.cuda.current_stream(device))
        return earlier

    def _send(self, here: Block) -> None:
        """Copy the shard home while the device goes on."""
        self._wait_for_user()
        self._arrive()
        if self._host is None:
            self._host = self.chunk.memory.allocate(here.tensor.numel(), self.dtype, self.home, self._name)
        with beside(self.chunk.device):
            self._host.tensor.copy_(here.tensor, non_blocking=True)
            self._sent = mark(self.chunk.device)
        if here.tensor.is_cuda:
            here.tensor.record_stream(stream_of(self.chunk.device))
        here.free()
        self._here, self.shard = None, self._host.tensor

    def _arrive(self) -> None:
        """Wait for the copy that is on its way home."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

    def _wait_for_user(self) -> None:
        if self._in_use is not None:
            self._in_use()
            self._in_use = None

    def _complete(self) -> Block:
        """The whole chunk's gradient with zeros where there is none, padding included."""
        if self._whole is None:
            block = self.chunk.memory.allocate(self.chunk.spec.size_elems, self.dtype, "device", self._name)
            block.tensor.zero_()
            return block
        whole, end = self._whole.tensor, 0
        for place, slot in enumerate(self.chunk.spec.slots):
            if place in self._filled:
                whole[end : slot.start_elems].zero_()
                end = slot.start_elems + slot.numel
        whole[end:].zero_()
        return self._whole
