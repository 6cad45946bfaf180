"""A chunk: a flat run of parameters that is gathered, used, reduced and let go as one.

Its life, with N ranks in the group:

1. ``fill`` writes this rank's share of every parameter's first values into the shard (1/N of the chunk).
2. ``gather`` starts bringing all N shards together in one flat tensor on the compute device; ``wait`` ends it. The
   parameters are views of that tensor: what the all-gather writes is what the model computes with, without a copy.
3. ``release`` gives the memory back. The tensor stays the same object with an empty storage, so that views which
   autograd saved for backward are whole again when the chunk is gathered for it.
4. Gradients are collected beside it (:mod:`meshfold.zero_gemini.chunks.gradient`), the optimizer changes the shard, and the
   next ``gather`` shows its work.

A *resident* chunk is never let go: its shard is this rank's part of the gathered tensor itself. Between steps a chunk
may be given another home (``rehome``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from meshfold.mesh import Group, Pending
from meshfold.mesh.collectives import all_gather_into
from meshfold.zero_gemini.chunks.layout import ChunkSpec, ShardSlice
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.memory.arena import Block
from meshfold.zero_gemini.memory.arenas import Memory, Place
from meshfold.zero_gemini.memory.copies import beside, mark, queue_behind


class Chunk:
    """Parameters in one piece of memory.

    Attributes:
        spec: which parameter lies where.
        group: the ranks that hold a shard each.
        home: where the shard is while the chunk is not gathered.
        shard: this rank's elements, at home.
        slices: which stretches of which parameters these are.
        resident: the gathered tensor is always there.
        is_due: the optimizer's last step of the shard was promised, and ``due`` waits for it and publishes it.
        is_stepped: whether ``due`` would not have to wait.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        slices: Sequence[ShardSlice],
        parameters: Sequence[nn.Parameter],
        shapes: Sequence[torch.Size],
        group: Group,
        *,
        dtype: torch.dtype,
        memory: Memory,
        home: Place,
        whole_group: bool,
    ) -> None:
        """Args:
        spec: sizes and slots.
        slices: what of them lies in this rank's shard.
        parameters: those of the slots, in order; from now on they are views of the chunk, in its dtype.
        shapes: of the parameters.
        dtype: in which the model computes.
        memory: where chunks live.
        home: where the shard is while the chunk is not gathered: ``"device"`` or ``"host"``.
        whole_group: keep the whole chunk on the device, as stages 1 and 2 do, wherever its home is.
        """
        self.spec, self.slices, self.parameters, self.group = spec, list(slices), list(parameters), group
        self.dtype, self.memory, self.home = dtype, memory, home
        self.device = memory.device
        self._stays = whole_group
        self._length = spec.shard_elems
        self._shapes = list(shapes)
        self._name = f"parameters {spec.names[0]} to {spec.names[-1]}"
        self._block = memory.allocate(spec.size_elems, dtype, "device", self._name)
        self._whole = self._block.tensor.zero_()
        self.resident = self._is_resident()
        self._own: Block | None = None
        self.shard = self._part()
        if not self.resident:
            self._own = memory.allocate(self._length, dtype, home, self._name)
            self.shard = self._own.tensor.zero_()
        self.is_due = False
        self.due: Callable[[], None] | None = None
        self.is_stepped: Callable[[], bool] | None = None
        self._nothing = torch.empty(0, dtype=dtype, device=self.device)
        self._pending: Pending | None = None
        self._copied: torch.cuda.Event | None = None
        self._gathered = True
        self._show()
        self.release()

    def _is_resident(self) -> bool:
        return self._stays or (self.group.size == 1 and self.home == "device")

    def _part(self) -> Tensor:
        """This rank's part of the gathered tensor."""
        return self._whole[self.group.index * self._length : (self.group.index + 1) * self._length]

    def rehome(self, home: Place) -> None:
        """Let the shard live elsewhere from now on. What is on its way is waited for; no step may be due.

        Raises:
            OutOfBudget: if there is not as much memory; the chunk is where it was then.
        """
        if home == self.home:
            return
        self.release()
        before, was, own = self.home, self.resident, self._own
        self.home = home
        self.resident = self._is_resident()
        if self.resident and was:
            return
        try:
            if self.resident:
                self._block.restore()
                block = None
            else:
                block = self.memory.allocate(self._length, self.dtype, home, self._name)
        except BaseException:
            self.home, self.resident = before, was
            raise
        if block is None:
            self._whole.copy_(self.shard)
            self.shard, self._gathered = self._part(), True
            self._show()
        else:
            block.tensor.copy_(self.shard)
            self.shard = block.tensor
        self._own = block
        if own is not None:
            own.free()
        if was:
            self.release()

    def exchange(self, block: Block) -> Block:
        """Let the shard be another block at home, which has its next values; the one that it was. Not of a resident chunk."""
        own = self._own
        assert own is not None  # a resident one's shard is a part of what is gathered
        self._own, self.shard = block, block.tensor
        return own

    # -- bringing together, letting go --------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """What it takes of the compute device while it is gathered."""
        return self._block.nbytes

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters can be computed with, now or after ``wait``."""
        return self._gathered

    def gather(self) -> None:
        """Start bringing the shards together; nothing if they are together or on their way. All of the group must call."""
        self.settle()
        if self._gathered:
            return
        self._block.restore()
        mine = self._part()
        with self.memory.waiting("parameters"), beside(self.device):
            mine.copy_(self.shard, non_blocking=True)
            self._pending = all_gather_into(self._whole, mine, self.group)
            self._copied = mark(self.device)
        self._gathered = True

    @property
    def may_come_early(self) -> bool:
        """Whether to gather it before its use keeps nobody waiting. Ranks that share it must find the same: one alone may look
        how far the optimizer is."""
        if not self.is_due:
            return True
        return self.group.size == 1 and self.is_stepped is not None and self.is_stepped()

    def settle(self) -> None:
        """Wait for the optimizer, if it is still at work on the shard."""
        if self.is_due and self.due is not None:
            self.is_due = False
            with self.memory.waiting("the optimizer's step"):
                self.due()

    def wait(self) -> None:
        """End what ``gather`` started: parameters may be used.

        Raises:
            ChunkError: if nothing was started.
        """
        if self._pending is not None:
            with self.memory.waiting("parameters"):
                queue_behind(self._copied, self.device)
                self._pending.wait()
            self._pending = self._copied = None
            self._show()
        elif not self._gathered:
            raise ChunkError(f"{self} was waited for before it was gathered")

    def release(self) -> None:
        """Give the gathered tensor's memory back."""
        if self.resident or not self._gathered:
            return
        if self._pending is not None:
            self.wait()
        for parameter in self.parameters:
            parameter.data = self._nothing
        self._block.empty()
        self._gathered = False

    def show_shapes(self, yes: bool) -> None:
        """Let the parameters of a released chunk have their shapes, and zero for all elements; or nothing, as before."""
        if self._gathered:
            return
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        for parameter, shape in zip(self.parameters, self._shapes, strict=True):
            parameter.data = zero.expand(shape) if yes else self._nothing

    @torch.no_grad()
    def show(self, values: Tensor) -> None:
        """Start bringing new values of the shard from another place, beside what is computed; then ``publish``."""
        with beside(self.device):
            self.shard.copy_(values, non_blocking=True)
            self._copied = mark(self.device)

    def publish(self) -> None:
        """After the shard has changed: start showing it to the group where the chunk is resident; then ``wait``."""
        if self.resident:
            if self.group.size > 1:
                queue_behind(self._copied, self.device)
            self._pending = all_gather_into(self._whole, self.shard, self.group)

    @torch.no_grad()
    def spoil(self) -> None:
        """The optimizer's work on the shard is lost: show NaN in its place, which nobody takes for a result."""
        self.shard.fill_(torch.nan)
        self.publish()

    def _show(self) -> None:
        for parameter, slot, shape in zip(self.parameters, self.spec.slots, self._shapes, strict=True):
            parameter.data = self._whole[slot.start_elems : slot.start_elems + slot.numel].view(shape)

    def wait_if_resident(self) -> None:
        """End what ``publish`` started."""
        if self.resident:
            self.wait()

    # -- values -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, name: str, block: Tensor) -> None:
        """Take a parameter's values: this rank keeps its share of them.

        Args:
            name: of the parameter.
            block: of its shape, any dtype and device.
        """
        for part in self.slices:
            if part.name == name:
                self.shard[part.shard_start : part.shard_start + part.length].copy_(self.cut(name, block))

    def cut(self, name: str, block: Tensor) -> Tensor:
        """This rank's elements, flat, of a tensor of a parameter's shape; none if it has none."""
        part = next((part for part in self.slices if part.name == name), None)
        start, length = (0, 0) if part is None else (part.parameter_start, part.length)
        return block.detach().reshape(-1)[start : start + length]

    def span(self, name: str) -> tuple[int, int]:
        """From and to which element of the shard a parameter goes, of which this rank has some."""
        part = next(part for part in self.slices if part.name == name)
        return part.shard_start, part.shard_start + part.length

    def lengths(self, name: str) -> list[int]:
        """How many elements of a parameter each rank of the group has."""
        slot = next(slot for slot in self.spec.slots if slot.name == name)
        begin, end = slot.start_elems, slot.start_elems + slot.numel
        starts = range(0, self.spec.size_elems, self._length)
        return [max(0, min(end, start + self._length) - max(begin, start)) for start in starts]

    def __repr__(self) -> str:
        names = self.spec.names
        return f"chunk of {names[0]} to {names[-1]} ({self.spec.size_elems:,} elements)"
