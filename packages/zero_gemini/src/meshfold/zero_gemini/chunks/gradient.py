"""Gradients of a chunk: collected while backward runs, summed over the group, kept as one shard.

Stage 1 of ZeRO collects the micro-steps of an accumulation in one flat tensor of the whole chunk, and sums it over the group once,
at the last (1/N of the communication, N times the memory). Stages 2 and 3 sum after every micro-step and keep 1/N. If the
backward's role is ``"apart"``, they collect whole chunks too, in the memory of the optimizer's state. Chunks are reduced in the
same order on every rank, whatever order gradients arrive in.

A parameter that no rank used has no gradient, as in a single process. Ranks that used different parameters have to make the
same collective calls. So missing gradients count as zero, and flags of the used parameters are sent along.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshfold.mesh import Pending, reduce_scatter
from meshfold.mesh.collectives.push import reduce_scatter_push_squares
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.states import GRAD_TRANSITIONS, BackwardRole, GradState, check_transition
from meshfold.zero_gemini.chunks.whole_gradient import WholeGradient, runs_of
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.group_flags import Flags
from meshfold.zero_gemini.memory.arena import Block, MemoryTier
from meshfold.zero_gemini.memory.copies import Arrival, copy_to_host, fetch, wait_for_copies


class Capture(Protocol):
    """Captures the step in which a gradient is complete (:mod:`meshfold.zero_gemini.runtime.captured_moves`)."""

    def send(self, gradient: ChunkGradient, whole: Block) -> None:
        """Send a complete gradient to its tier, now and in each replay."""


class ChunkGradient:
    """Collects the gradients of one chunk.

    Attributes:
        capture: captures this backward; None if it is not captured.
        state: of the gradients collected since the last ``clear``.
        tier: memory of the optimizer's state.
        shard: the sum over the group and over micro-steps of this rank's elements; None before it exists.
        used: indices of the parameters that had a gradient on this rank since the last ``clear``.
        measured: result of ``measure``, computed of the complete shard before it was offloaded or lent.
        sums: total number of additions to the shard.
    """

    def __init__(
        self,
        chunk: Chunk,
        dtype: torch.dtype,
        tier: MemoryTier,
        *,
        every_time: bool,
        measure: Callable[[Tensor, Tensor | None], Tensor],
        wait_for_reader: Callable[[], None],
    ) -> None:
        """Args:
        chunk: whose gradients are collected.
        dtype: in which gradients are summed.
        tier: memory of the optimizer's state; complete shards are sent there.
        every_time: reduce after every backward, not only after the last of an accumulation.
        measure: computes this shard's contribution to the norm while the complete shard is on the device: from its sums of
            squares if the reduction has computed them, otherwise from the shard.
        wait_for_reader: returns once the optimizer has read the shard that it was lent (:meth:`lend`).
        """
        self.chunk, self.dtype, self.tier = chunk, dtype, tier
        self.capture: Capture | None = None
        self._wants_every_time, self._measure = every_time, measure
        self._wait_for_reader = wait_for_reader
        self.state = GradState.EMPTY
        self._kind: BackwardRole = "more"
        self.measured: Tensor | None = None
        self._arrived: set[int] = set()  # indices whose gradient of this backward has arrived
        self._was_sent = False  # this backward's gradients are being reduced
        self._apart: Block | None = None  # whole gradients of earlier backwards, on the host
        self._owed = False  # ``_apart`` has gradients
        self._reduction: Pending | None = None
        self._squares: Tensor | None = None  # sums of squares of the reduction's result
        self._is_wide = False  # whole gradients of several backwards are added up
        self._sending: list[Block] = []  # the reduction's input
        self._flags: Flags | None = None  # parameters used, and True if more may come
        self._answers: list[bool] = []
        self._here: Block | None = None  # the shard, on the compute device
        self._host: Block | None = None  # the shard, on the host; reused in the next step
        self._sent: torch.cuda.Event | None = None
        self._is_lent = False  # the optimizer may be reading the shard on the host
        self._name = f"gradients of {chunk.spec.names[0]} to {chunk.spec.names[-1]}"
        self._whole = WholeGradient(chunk, self._name)  # not reduced yet
        self.shard: Tensor | None = None
        self.used: set[int] = set()
        self.sums = 0

    def _to(self, state: GradState) -> None:
        check_transition(self._name, GRAD_TRANSITIONS, self.state, state)
        self.state = state

    @property
    def _every_time(self) -> bool:
        """True if whole gradients wait for the last micro-step outside the device's memory."""
        return self._wants_every_time and (self.chunk.group.size > 1 or self.tier != "device")

    def move(self, tier: MemoryTier) -> None:
        """Send complete shards to another tier from now on. Call it after ``clear``; waits for lent shards."""
        self._end_lending()
        if self._host is not None and tier == "device":
            self._host.free()
            self._host = None
        self.tier = tier

    # -- while backward runs ------------------------------------------------------------------------------------

    def expect(self, kind: BackwardRole) -> None:
        """Prepare for a backward, on all ranks. Gradients that several leave for one reduction are added in the sum's dtype."""
        self._is_wide |= kind == "apart" or (kind == "more" and not self._every_time)

    def begin(self) -> None:
        """Reset what belongs to one backward, before the next."""
        self._arrived.clear()
        self._was_sent = False

    @property
    def is_full(self) -> bool:
        """True if every parameter's gradient of this backward has arrived."""
        return len(self._arrived) == len(self.chunk.parameters)

    @property
    def has_late_parts(self) -> bool:
        """True if gradients of this backward arrived after the reduction: only a single process can add them."""
        return self._was_sent and bool(self._whole.filled) and self.chunk.group.size == 1

    @property
    def is_pending(self) -> bool:
        """True if a reduction is under way."""
        return self.state is GradState.REDUCING

    @property
    def is_settled(self) -> bool:
        """True if all ranks know that no more gradients come before the next step, and the optimizer has not taken it yet."""
        return self.state is GradState.SETTLED

    @property
    def is_consumed(self) -> bool:
        """True if the optimizer has taken it."""
        return self.state is GradState.CONSUMED

    def add(self, place: int, gradient: Tensor) -> int:
        """Add a gradient. Return its bytes if it is only noted until :meth:`copy_noted`, else 0.

        Raises:
            ChunkError: if it comes after the last one.
        """
        if self.state is GradState.SETTLED or self.state is GradState.CONSUMED:
            raise ChunkError(
                f"{self.chunk.spec.names[place]!r} got a second gradient in one backward, after the optimizer was given the first: "
                "use torch.utils.checkpoint.checkpoint with use_reentrant=False, or clip by norm, for which gradients are held"
            )
        # Other ranks expect no second reduction, so this rank's gradient would be lost.
        if self._was_sent and self._kind in ("last", "final") and self.chunk.group.size > 1:
            raise ChunkError(
                f"{self.chunk.spec.names[place]!r} got a second gradient in one backward, after the first was sent to the other "
                "ranks: use torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        self.collect()  # a second gradient in one backward, after the first was sent
        holds = self.chunk.is_pushed and self.chunk.group.size > 1 and not self._is_wide and not self._owed
        noted_bytes = self._whole.add(place, gradient, self._sent_dtype, hold=holds)
        self.used.add(place)
        self._arrived.add(place)
        if self.state is not GradState.ACCUMULATING:
            self._to(GradState.ACCUMULATING)
        return noted_bytes

    def copy_noted(self) -> None:
        """Copy the gradients that were only noted, so that their own memory is free."""
        self._whole.copy_noted()

    def reduce(self, kind: BackwardRole, *, unsure: bool = False) -> None:
        """Start the sum over the group, if it is due. All ranks of the group must call, for the chunks in the same order.

        Args:
            kind: of the backward.
            unsure: more of this chunk's gradient may come in this backward. In a final backward all ranks learn of it.
        """
        if kind == "apart" and self._wants_every_time and self.chunk.group.size > 1:
            self._put_aside()
            return
        if not (kind in ("last", "final") or self._every_time):
            return
        self.collect()
        if self.state is GradState.SETTLED or self.state is GradState.CONSUMED:
            return
        self._kind, self._was_sent = kind, True
        held = [] if self._owed else self._whole.take_held()
        blocks = held or [self._complete()]
        self._to(GradState.REDUCING)
        if self.chunk.group.size > 1:
            self._reduction = self._start_sum(runs_of(self.chunk, held) if held else blocks[0].tensor)
            self._sending = blocks
        if kind == "final":
            mine = [place in self.used for place in range(len(self.chunk.parameters))]
            if self.chunk.group.size > 1:
                self._flags = Flags([*mine, unsure], self.chunk.group, self.chunk.device)
            self._answers = [*mine, unsure]
        if self.chunk.group.size == 1:
            self._keep(blocks[0])

    def _start_sum(self, whole: Tensor | Sequence[Tensor]) -> Pending:
        if self.chunk.is_pushed:
            pending, self._squares = reduce_scatter_push_squares(whole, self.chunk.group, dtype=self.dtype)
            return pending
        assert isinstance(whole, Tensor)  # only pushes take a gradient from several tensors
        return reduce_scatter(whole, self.chunk.group, 0, async_op=True)

    def collect(self) -> None:
        """Finish a reduction that is under way, if there is one."""
        if self._reduction is None:
            return
        arrived = self._reduction.wait()
        for block in self._sending:
            block.free()
        self._reduction, self._sending = None, []
        squares, self._squares = self._squares, None
        self._keep(self.chunk.memory.count(arrived, self._name), squares)

    # -- the complete shard -------------------------------------------------------------------------------------

    def finish(self) -> Tensor:
        """Return the complete shard, on its tier, after the last reduction.

        Raises:
            ChunkError: if there was none, or gradients came after it.
        """
        self.collect()
        if self.state is GradState.ACCUMULATING:
            raise ChunkError(
                f"{self._name}: some of them are not summed over the ranks yet: call begin(last=True) before the last "
                "backward of a step, or reduce_rest() after it"
            )
        if self.shard is None:
            raise ChunkError(f"{self.chunk}: its gradient was requested before any backward")
        self._arrive()
        return self.shard

    @property
    def names_used(self) -> set[str]:
        """Names of the parameters that any rank used, after a final backward."""
        return {name for name, used in zip(self.chunk.spec.names, self._answers, strict=False) if used}

    @property
    def has_buffer(self) -> bool:
        """True if it has separate memory for the shard on the host."""
        return self._host is not None

    def offload(self) -> None:
        """Move the complete shard to its tier, if that is not the device."""
        if self._here is not None and self.tier != "device":
            self.send(self._here)

    def hand_out(self) -> Block | None:
        """Return the complete shard on the compute device, for the caller to free; None if it was offloaded: use ``shard`` then.

        ``measured`` stays.

        Raises:
            ChunkError: if no gradient was reduced, or it has been handed out already.
        """
        self.collect()
        if self.shard is None:
            raise ChunkError(f"{self.chunk}: its gradient was requested before any backward")
        self._to(GradState.CONSUMED)
        if self._here is None:
            return None
        block, self._here, self.shard = self._here, None, None
        return block

    def arrival(self) -> Arrival:
        """Return a function that waits until the shard is on the host, as :meth:`finish` does."""
        return Arrival(self._sent)

    def on_its_way(self) -> Callable[[], None]:
        """Return a function that waits until the shard is on the host; from now on the caller must call it."""
        sent, self._sent = self._sent, None
        return Arrival(sent)

    def lend(self) -> None:
        """Let the optimizer read the shard on the host in the background; it is not overwritten before that is done."""
        self._is_lent = True

    def hand_over(self) -> None:
        """Hand the complete shard over to the optimizer's step."""
        self._to(GradState.CONSUMED)
        self.lend()

    def clear(self) -> None:
        """Forget everything."""
        self.collect()
        self._arrive()
        if self._apart is not None:
            wait_for_copies(self.chunk.device)  # its own may still be running
        self._whole.clear()
        for block in (self._here, self._apart):
            if block is not None:
                block.free()
        self._here = self._apart = self.shard = self.measured = self._flags = None
        self._owed = self._is_wide = False
        if self.state is not GradState.EMPTY:
            self._to(GradState.EMPTY)
        self._answers = []
        self.begin()
        self.used.clear()

    def close(self) -> None:
        """Release all memory."""
        self._end_lending()
        self.clear()
        if self._host is not None:
            self._host.free()
            self._host = None

    # -- within -------------------------------------------------------------------------------------------------

    def _allocate(self, elements: int, place: MemoryTier = "device", dtype: torch.dtype | None = None) -> Block:
        return self.chunk.memory.allocate(elements, dtype or self.dtype, place, self._name)

    @property
    def _sent_dtype(self) -> torch.dtype:
        """Dtype of whole gradients: a backward computes them in the parameters', and pushed ones are summed on arrival."""
        return self.chunk.dtype if self.chunk.is_pushed and not self._is_wide else self.dtype

    def _keep(self, arrived: Block, squares: Tensor | None = None) -> None:
        """Add the sum to the shard and offload it; after a final backward it stays on the device for the step.

        ``squares``: of the sum alone.
        """
        tensor = arrived.tensor
        if self.capture is not None and self.shard is not None:
            raise ChunkError(f"{self._name} came twice in one backward, which cannot be captured")
        if self._here is not None:
            tensor.add_(self._here.tensor)
            self._here.free()
            squares = None
        elif self.shard is not None:  # offloaded by an earlier micro-step
            tensor.add_(fetch(self.shard, self.chunk.device))
            squares = None
        self._here, self.shard, self.measured = arrived, tensor, None
        self.sums += 1
        if self._kind == "final" or (squares is not None and self._kind == "last"):
            self.measured = self._measure(tensor, squares)
        if self._kind == "final":
            if self._flags is not None:
                self._answers, self._flags = self._flags.read(), None
            self._to(GradState.REDUCED if self._answers[-1] else GradState.SETTLED)
            return
        self._to(GradState.REDUCED)
        if self.tier != "device" and self._kind == "last" and self.measured is None:
            self.measured = self._measure(tensor, None)
        if self.capture is not None:
            self.capture.send(self, arrived)
        elif self.tier != "device":
            self.send(arrived)

    def take_replayed(self, whole: Tensor, used: Collection[int], measured: Tensor | None) -> torch.cuda.Event | None:
        """Take the complete gradient of a replayed backward, the first since ``clear``, and send it to its tier.

        Args:
            whole: of a group of one rank, on the compute device. Its memory stays until the copy has ended.
            used: indices of the parameters that have one.
            measured: for the norm; None: it is not known.

        Returns:
            The end of the copy to the host, if there is one.
        """
        self._to(GradState.REDUCING)
        self._kind = "last"
        here = self._here = self.chunk.memory.count(whole, self._name)
        self.shard, self.measured = whole, measured
        self.used.update(used)
        self.sums += 1
        self._to(GradState.REDUCED)
        return None if self.tier == "device" else self.send(here, lasts=True)

    def send(self, here: Block, *, lasts: bool = False) -> torch.cuda.Event | None:
        """Copy the complete shard to the host while the device computes; return the end of the copy (None: done).

        ``lasts``: somebody else keeps its memory until then.
        """
        with self.chunk.memory.waiting("a gradient's buffer on the host"):
            self._end_lending()
            self._arrive()
            if self._host is None:
                self._host = self._allocate(here.tensor.numel(), self.tier)
        self._sent = copy_to_host(here.tensor, self._host.tensor, self.chunk.device, lasts=lasts)
        here.free()
        self._here, self.shard = None, self._host.tensor
        return self._sent

    def _arrive(self) -> None:
        """Wait for the copy to the host."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

    def _end_lending(self) -> None:
        if self._is_lent:
            self._wait_for_reader()
            self._is_lent = False

    # -- whole chunks -------------------------------------------------------------------------------------------

    def _put_aside(self) -> None:
        """Offload this backward's whole gradients without reducing them."""
        if self.tier == "device" or not self._whole.filled:
            return
        whole = self._complete()
        if self._apart is None:
            self._apart = self._allocate(self.chunk.spec.size_elems, self.tier)
        copy_to_host(whole.tensor, self._apart.tensor, self.chunk.device)
        whole.free()
        self._owed = True

    def _complete(self) -> Block:
        """Return the whole chunk's gradient: zeros where none arrived and in padding, plus offloaded gradients."""
        whole = self._whole.take(self._sent_dtype)
        if self._owed and self._apart is not None:
            whole.tensor.add_(fetch(self._apart.tensor, self.chunk.device))
            self._owed = False
        return whole
