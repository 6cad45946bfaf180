"""A chunk: a flat run of parameters that is gathered, used, reduced and released as one.

Its life, with N ranks in the group (states are those of :class:`~meshfold.zero_gemini.chunks.states.ChunkState`):

1. ``fill`` writes this rank's share of every parameter's first values into the shard (1/N of the chunk): *sharded*.
2. ``gather`` starts the all-gather of all N shards into one flat tensor on the compute device (*gathering*); ``wait`` ends it
   (*gathered*). The parameters are views of that tensor: the model computes with the all-gather's output, without a copy.
3. ``release`` gives the memory back. The tensor stays the same object with an empty storage, so that views which
   autograd saved for backward are whole again when the chunk is gathered for it.
4. Gradients are collected separately (:mod:`meshfold.zero_gemini.chunks.gradient`), and the optimizer changes the shard: at once,
   or in the background after ``promise_step`` (*step pending*). ``wait_step``, which the next ``gather`` calls, waits for it.

If only products in fp8 read a chunk's parameters, their operands are gathered instead, in one byte an element
(:mod:`meshfold.zero_gemini.chunks.fp8_gather`). The parameters themselves are then NaN while the shard is on the device.

A *resident* chunk is never released: its shard is this rank's part of the gathered tensor itself. Between steps a chunk
may be moved to other memory (``move``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from meshfold.kernels import Fp8Weight
from meshfold.mesh import Group, Pending, with_old_names
from meshfold.mesh.collectives import all_gather_into
from meshfold.mesh.collectives.push import all_gather_push
from meshfold.zero_gemini.chunks.chunk_parameters import ChunkParameters, Matrices
from meshfold.zero_gemini.chunks.fp8_gather import Fp8Gather, Operands
from meshfold.zero_gemini.chunks.layout import ChunkSpec, ShardSlice
from meshfold.zero_gemini.chunks.states import CHUNK_TRANSITIONS, ChunkState, check_transition
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.memory.arena import Block, Memory, MemoryTier
from meshfold.zero_gemini.memory.copies import beside, mark, queue_behind


class PendingStep(Protocol):
    """An optimizer step of a chunk that runs in the background."""

    def is_done(self) -> bool:
        """Return True if ``wait`` would return at once."""

    def wait(self) -> bool:
        """Wait for the step. Return True if it succeeded and the new values are ready."""

    def land(self) -> None:
        """Start writing the new values to the chunk's shard, unless they were written already. Call ``wait`` before."""


@with_old_names({"home": "tier", "rehome": "move"})
class Chunk:
    """Parameters in one tensor.

    Attributes:
        spec: positions of the parameters.
        group: the ranks that hold a shard each.
        tier: memory of the shard while the chunk is not gathered.
        shard: this rank's elements, in the memory of ``tier``.
        slices: the parts of parameters in the shard.
        resident: the gathered tensor is never released.
        state: of its memory and values.
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
        tier: MemoryTier,
        whole_group: bool,
        fp8: Sequence[Fp8Weight] = (),
        pushed: bool = False,
    ) -> None:
        """Args:
        spec: sizes and slots.
        slices: their parts in this rank's shard.
        parameters: one for each slot, in order; from now on they are views of the chunk, in its dtype.
        shapes: of the parameters.
        dtype: in which the model computes.
        memory: where chunks are stored.
        tier: memory of the shard while the chunk is not gathered: ``"device"`` or ``"host"``.
        whole_group: keep the whole chunk on the device, as stages 1 and 2 do, for any placement of its shard.
        fp8: how each parameter is multiplied in fp8, if only such products read them; else empty.
        pushed: copy engines carry its gathers and the reductions of its gradient; the group can push.
        """
        self.spec, self.slices, self.parameters, self.group = spec, list(slices), list(parameters), group
        self.dtype, self.memory, self.tier = dtype, memory, tier
        self.device, self.is_pushed = memory.device, pushed
        self._stays = whole_group
        self._length = spec.shard_elems
        self._name = f"parameters {spec.names[0]} to {spec.names[-1]}"
        self._block = memory.allocate(spec.size_elems, dtype, "device", self._name)
        self._whole = self._block.tensor.zero_()
        self.resident = self._is_resident()
        self._own: Block | None = None
        self.shard = self._own_part()
        if not self.resident:
            self._own = memory.allocate(self._length, dtype, tier, self._name)
            self.shard = self._own.tensor.zero_()
        # A released chunk has no storage; views of it stay.
        self._views = [part.view(shape) for part, shape in zip(parts_of(spec, self._whole)[0], shapes, strict=True)]
        nothing = torch.empty(0, dtype=dtype, device=self.device)
        self._shown = ChunkParameters(parameters, spec.names, shapes, nothing)
        self._step: PendingStep | None = None
        self._all_gathers: list[Pending] = []
        self._copied: torch.cuda.Event | None = None
        self._fp8 = Fp8Gather(spec, self.slices, shapes, fp8, group, self._whole) if fp8 else None
        self._supply()
        self.state = ChunkState.GATHERED
        self._show()
        self.release()

    def _is_resident(self) -> bool:
        return self._stays or (self.group.size == 1 and self.tier == "device")

    def _own_part(self) -> Tensor:
        """Return this rank's part of the gathered tensor."""
        return self._whole[self.group.index * self._length : (self.group.index + 1) * self._length]

    @property
    def travels_in_fp8(self) -> bool:
        """Return True if operands in fp8 are gathered in place of the parameters themselves."""
        return self._fp8 is not None and self.tier == "device" and not self.resident

    def _supply(self) -> None:
        if self._fp8 is not None:
            self._fp8.supply(self._fetch if self.travels_in_fp8 else None)

    def _fetch(self) -> None:
        """Gather the forward operands too, for a forward that is repeated in a backward."""
        self.gather(Operands.FORWARD)
        self.wait()

    def _to(self, state: ChunkState) -> None:
        check_transition(self, CHUNK_TRANSITIONS, self.state, state)
        self.state = state

    def move(self, tier: MemoryTier) -> None:
        """Move the shard to another placement. Waits for an all-gather that is under way.

        Raises:
            OutOfBudget: if memory does not suffice; the chunk then stays where it was.
            ChunkError: if a step is pending.
        """
        if tier == self.tier:
            return
        if self.step_is_pending:
            raise ChunkError(f"{self} was moved while a step of it is pending: wait for the step first")
        self.release()
        before, was, own = self.tier, self.resident, self._own
        self.tier = tier
        self.resident = self._is_resident()
        if self.resident and was:
            return
        try:
            if self.resident:
                self._block.restore()
                block = None
            else:
                block = self.memory.allocate(self._length, self.dtype, tier, self._name)
        except BaseException:
            self.tier, self.resident = before, was
            raise
        if block is None:
            self._whole.copy_(self.shard)
            self.shard = self._own_part()
            self._to(ChunkState.GATHERED)
            self._show()
        else:
            block.tensor.copy_(self.shard)
            self.shard = block.tensor
        self._own = block
        if own is not None:
            own.free()
        if was:
            self.release()
        self._supply()

    def exchange(self, block: Block) -> Block:
        """Make another block, which has the next values, the shard, and return the old one. Not for resident chunks."""
        own = self._own
        assert own is not None  # a resident chunk's shard is a part of the gathered tensor
        self._own, self.shard = block, block.tensor
        return own

    # -- gathering and releasing --------------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """Bytes that the chunk takes on the compute device while it is gathered."""
        return self._block.nbytes

    @property
    def address(self) -> int:
        """Address of a resident chunk's gathered tensor; 0 for other chunks, whose tensor has no memory while released."""
        return self._whole.data_ptr() if self.resident else 0

    @property
    def is_gathered(self) -> bool:
        """True if the gathered tensor exists, now or after ``wait``."""
        return self.state is not ChunkState.SHARDED and self.state is not ChunkState.STEP_PENDING

    @property
    def is_gathering(self) -> bool:
        """True if an all-gather is under way."""
        return self.state is ChunkState.GATHERING

    def allocate(self) -> Tensor:
        """Give the gathered tensor of a released chunk its memory, which :meth:`gather` does otherwise; return it."""
        self._block.restore()
        return self._whole

    def copy_shard(self, place: Tensor) -> torch.cuda.Event | None:
        """Copy the shard to memory of the compute device, once a pending step has ended; return the event of its end, None if over.

        For replays of a captured step of one rank, which read the parameters there; the chunk stays released.
        """
        self.wait_step()
        with self.memory.waiting("parameters"), beside(self.device):
            place.copy_(self.shard, non_blocking=True)
            return mark(self.device)

    def gather(self, operands: Operands = Operands.BOTH) -> None:
        """Start the all-gather of the shards, unless it is done or under way. All ranks of the group must call.

        Args:
            operands: those that the next use reads; only for a chunk that is gathered in fp8.
        """
        self.wait_step()
        fp8 = self._fp8 if self.travels_in_fp8 else None
        missing = Operands(0) if fp8 is None else fp8.missing(operands)
        if self.is_gathered and not missing:
            return
        self._block.restore()
        with self.memory.waiting("parameters"), beside(self.device):
            if fp8 is not None:
                self._all_gathers += fp8.start(missing, self.shard, self._start_gather)
            else:
                mine = self._own_part()
                mine.copy_(self.shard, non_blocking=True)
                self._all_gathers.append(self._start_gather(self._whole, mine))
            self._copied = mark(self.device)
        if not self.is_gathering:
            self._to(ChunkState.GATHERING)

    def _start_gather(self, whole: Tensor, mine: Tensor) -> Pending:
        """Start the all-gather of every rank's part into a tensor."""
        if self.is_pushed:
            return all_gather_push(mine, self.group, whole)
        return all_gather_into(whole, mine, self.group)

    def wait(self) -> None:
        """Wait for ``gather`` or ``publish``: then parameters may be used.

        Raises:
            ChunkError: if nothing was started.
        """
        if self._all_gathers:
            with self.memory.waiting("parameters"):
                queue_behind(self._copied, self.device)
                for pending in self._all_gathers:
                    pending.wait()
            self._all_gathers, self._copied = [], None
            self._to(ChunkState.GATHERED)
            self._show()
        elif not self.is_gathered:
            raise ChunkError(f"{self} was waited for before it was gathered")

    def release(self) -> None:
        """Release the gathered tensor's memory."""
        if self.resident or not self.is_gathered:
            return
        if self.is_gathering:
            self.wait()
        self._shown.release()
        if self._fp8 is not None:
            self._fp8.forget()
        self._block.empty()
        self._to(ChunkState.STEP_PENDING if self.state is ChunkState.STALE else ChunkState.SHARDED)

    def show_shapes(self, matrices: Matrices | None) -> None:
        """Give the parameters of a released chunk their shapes, with zero for all elements; None: restore them to no elements."""
        if self.is_gathered:
            return
        if self._fp8 is not None:  # products cast the zeros
            self._fp8.supply(self._fetch if self.travels_in_fp8 and matrices is None else None)
        if matrices is not None:
            self._shown.show_all(torch.zeros((), dtype=self.dtype, device=self.device), matrices)
        else:
            self._shown.release()

    def _show(self) -> None:
        if self._fp8 is not None and self.travels_in_fp8:
            self._shown.show_all(torch.full((), torch.nan, dtype=self.dtype, device=self.device))
            self._fp8.show()
            return
        self._shown.show(self._views, resident=self.resident)

    def written(self) -> dict[str, nn.Parameter]:
        """Return the parameters of a resident chunk that a user may have written to since this was last asked, by name."""
        return self._shown.written() if self.resident and not self.step_is_pending else {}

    def close(self) -> None:
        """Forget a pending step, and leave a resident chunk's parameters to the user."""
        self.drop_step()
        self._shown.unwatch()

    # -- the optimizer's step -----------------------------------------------------------------------------------

    @property
    def step_is_pending(self) -> bool:
        """True if an optimizer step of the shard is pending."""
        return self._step is not None

    @property
    def can_gather_early(self) -> bool:
        """True if prefetching it does not wait for the optimizer.

        Ranks that share the chunk must decide the same, so only a single rank may look at the optimizer's progress.
        """
        return self._step is None or (self.group.size == 1 and self._step.is_done())

    def promise_step(self, step: PendingStep) -> None:
        """Record that the optimizer steps the shard in the background. A gathered tensor keeps the values before the step.

        Raises:
            ChunkError: if a step is pending already.
        """
        if self.is_gathering:
            self.wait()
        self._to(ChunkState.STALE if self.is_gathered else ChunkState.STEP_PENDING)
        if self.resident:
            self._shown.refuse_old()
        self._step = step

    def wait_step(self) -> None:
        """Wait for a pending step, if there is one, and publish its values; if it failed they are NaN.

        A chunk that is not resident is released. All of the group must call.
        """
        step = self._step
        if step is None:
            return
        with self.memory.waiting("the optimizer's step"):
            try:
                succeeded = step.wait()
            finally:
                self.drop_step()
            if succeeded:
                step.land()
            else:
                self.shard.fill_(torch.nan)
            self.publish()

    def drop_step(self) -> None:
        """Forget a pending step, if there is one. A chunk that is not resident is released."""
        if self._step is not None:
            self.release()  # its gathered values are from before the step
            self._step = None
            self._to(ChunkState.GATHERED if self.resident else ChunkState.SHARDED)

    @torch.no_grad()
    def show(self, values: Tensor) -> None:
        """Start copying new values of the shard from other memory, in parallel with compute. Call ``publish`` afterwards."""
        self.wait_for_gather()
        with beside(self.device):
            self.shard.copy_(values, non_blocking=True)
            self._copied = mark(self.device)

    def wait_for_gather(self) -> None:
        """Wait for an all-gather that is under way, which reads the shard."""
        if self.is_gathering:
            self.wait()

    def publish(self) -> None:
        """Start gathering the changed shard again if the chunk is resident (then call ``wait``); else release the chunk.

        An all-gather that is under way is waited for.
        """
        if self._fp8 is not None:
            self._fp8.change()
        if not self.resident:
            self.release()
            return
        self.wait_for_gather()
        if self.group.size > 1:
            queue_behind(self._copied, self.device)
        self._all_gathers = [self._start_gather(self._whole, self.shard)]
        self._to(ChunkState.GATHERING)

    def wait_if_resident(self) -> None:
        """Wait for ``publish``."""
        if self.resident:
            self.wait()

    # -- values -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, name: str, block: Tensor) -> None:
        """Store this rank's share of a parameter's values.

        Args:
            name: of the parameter.
            block: of its shape, any dtype and device.
        """
        self.release()  # gathered values are from before
        for part in self.slices:
            if part.name == name:
                self.shard[part.shard_start : part.shard_start + part.length].copy_(self.cut(name, block))

    def cut(self, name: str, block: Tensor) -> Tensor:
        """Return this rank's elements of a tensor of a parameter's shape, flat; empty if it has none."""
        part = next((part for part in self.slices if part.name == name), None)
        start, length = (0, 0) if part is None else (part.parameter_start, part.length)
        return block.detach().reshape(-1)[start : start + length]

    def span(self, name: str) -> tuple[int, int]:
        """Return a parameter's range in the shard: its first element, and one past its last. This rank must have a part of it."""
        part = next(part for part in self.slices if part.name == name)
        return part.shard_start, part.shard_start + part.length

    def lengths(self, name: str) -> list[int]:
        """Return the number of elements of a parameter on each rank of the group."""
        return self.spec.lengths(name)

    def __repr__(self) -> str:
        names = self.spec.names
        return f"chunk of {names[0]} to {names[-1]} ({self.spec.size_elems:,} elements)"


def parts_of(spec: ChunkSpec, whole: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return every parameter's elements in a flat tensor of a whole chunk, in order of the slots, and the padding: flat views."""
    lengths: list[int] = []
    end = 0
    for slot in spec.slots:
        lengths += [slot.start_elems - end, slot.numel]
        end = slot.start_elems + slot.numel
    pieces = whole.split([*lengths, whole.numel() - end])
    return [*pieces[1::2]], [padding for padding in pieces[::2] if padding.numel()]
