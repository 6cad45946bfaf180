"""Gradients of all chunks: collected from autograd, reduced in order, measured, passed to the optimizer.

Backward reaches the last chunk first. Chunks that ranks share are reduced in that order on every rank, even if gradients arrive in
another order: a chunk that is complete early waits for those after it in the model. A chunk of one rank waits for none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from meshfold.mesh import Group
from meshfold.mesh.parameters import GradientProxy, after_gradients
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.chunks.states import BackwardRole
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.group_flags import Flags
from meshfold.zero_gemini.norm import total_norm
from meshfold.zero_gemini.optimizer.early_steps import EarlySteps
from meshfold.zero_gemini.optimizer.speculative_steps import SpeculativeSteps
from meshfold.zero_gemini.runtime.captured_moves import CapturedMoves
from meshfold.zero_gemini.runtime.module_hooks import Runtime
from meshfold.zero_gemini.runtime.open_calls import OpenCalls

_MOST_UNDER_WAY = 6  # pending reductions, before the oldest is waited for
_REST_UNDER_WAY = 1  # the same in ``reduce_rest``
_MOST_NOTED_BYTES = 32 * 2**20  # of gradients that wait to be copied together


class GradientFlow:
    """Hooks on parameters, and the order of reductions.

    Attributes:
        takes: whether gradients that arrive now count; they are dropped while it is False.
        kind: role of the backward that runs or comes next.
        capture: captures the backward that runs; None if it is not captured.
    """

    def __init__(
        self,
        gradients: dict[Chunk, ChunkGradient],
        order: Mapping[str, int],
        device: torch.device,
        runtime: Runtime,
        calls: OpenCalls,
        early: EarlySteps | None,
        speculative: SpeculativeSteps | None,
    ) -> None:
        """Args:
        gradients: of every chunk that is trained.
        order: the position of each parameter in the model, by name.
        device: where the model computes.
        runtime: gives the progress of a backward.
        calls: gives the chunks that a backward still reads.
        early: steps chunks in a final backward; None if the optimizer cannot.
        speculative: makes speculative steps in a last backward; None if the optimizer cannot.
        """
        self._gradients, self._device, self._runtime, self._calls = gradients, device, runtime, calls
        self._early, self._speculative = early, speculative
        self.takes = True
        self.capture: CapturedMoves | None = None
        self.kind: BackwardRole = "last"
        # In the order of their reduction. Chunks are made kind by kind (of dtype, of experts): reduced in that order, the head's
        # gradient would stay whole until that of the first layer's experts has come.
        firsts = {chunk: min(order[name] for name in chunk.spec.names) for chunk in gradients}
        self._all = [gradients[chunk] for chunk in sorted(gradients, key=firsts.__getitem__, reverse=True)]
        self._shared = [gradient for gradient in self._all if gradient.chunk.group.size > 1]
        self._next = 0  # number of shared ones already reduced in this backward
        self._full: dict[ChunkGradient, None] = {}  # of one rank, with all of their gradients, not reduced yet
        self._reduced: set[ChunkGradient] = set()  # in this backward
        # Pending reductions, each with the number of units entered before it.
        self._under_way: deque[tuple[int, ChunkGradient]] = deque()
        sizes = (chunk.spec.size_elems * gradient.dtype.itemsize for chunk, gradient in gradients.items())
        self._largest_bytes = max(sizes, default=0)
        self._left: list[ChunkGradient] = []  # whose reductions were pending at the end of the last backward
        self._in_parts: set[ChunkGradient] = set()  # some of their gradients came in a nested backward
        self._in_backward = False
        self._came = False  # a gradient arrived since ``expect``
        self._noted: dict[ChunkGradient, None] = {}  # some of their gradients wait for a copy
        self._noted_bytes = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._arrival(gradient, place))
            for chunk, gradient in gradients.items()
            for place, parameter in enumerate(chunk.parameters)
        ]

    @property
    def was_broken_off(self) -> bool:
        """True if a backward began and did not end."""
        return self._in_backward

    def expect(self, kind: BackwardRole) -> None:
        """Prepare for a backward. A final one steps chunks if the optimizer can do early steps."""
        self._came = False
        self.kind = "last" if kind == "final" and self._early is None else kind
        for gradient in self._all:
            gradient.expect(self.kind)
        if self.kind == "final" and self._early is not None:
            self._early.begin(self._all)
        elif (speculative := self._speculating) is not None:
            speculative.begin()

    @property
    def _speculating(self) -> SpeculativeSteps | None:
        """Return the speculative steps of the current or next backward; None if it makes none."""
        is_on = self.kind == "last" and self._speculative is not None and self._speculative.are_made
        return self._speculative if is_on else None

    # -- while backward runs ------------------------------------------------------------------------------------

    def _arrival(self, gradient: ChunkGradient, place: int) -> Callable[[Tensor], None]:
        flow, held = ref(self), ref(gradient)  # weak: the garbage collector does not see through hooks of parameters

        def arrive(parameter: Tensor) -> None:
            me, gradient = flow(), held()
            if me is None or gradient is None or isinstance(parameter.grad, GradientProxy):
                return  # dropped without close, or a backward outside the engine, while our proxy is in .grad
            found, parameter.grad = parameter.grad, None  # always clear it: autograd would add to it
            if me.takes and found is not None:
                if not me._in_backward:
                    me._in_backward = me._came = True
                    after_gradients(me._ended)
                if me._calls.note_gradient():
                    me._in_parts.add(gradient)
                noted_bytes = gradient.add(place, found)
                del found
                if noted_bytes:
                    me._noted[gradient] = None
                    me._noted_bytes += noted_bytes
                    if me._noted_bytes > _MOST_NOTED_BYTES:
                        me._copy_noted()
                if gradient.chunk.group.size == 1 and gradient.is_full and gradient not in me._reduced:
                    me._full[gradient] = None
                me._reduce_ready()

        return arrive

    def _copy_noted(self) -> None:
        for gradient in self._noted:
            gradient.copy_noted()
        self._noted.clear()
        self._noted_bytes = 0

    def _reduce_ready(self) -> None:
        for gradient in [each for each in self._full if self._is_ready(each)]:
            del self._full[gradient]
            self._reduce(gradient)
        while self._next < len(self._shared) and self._is_ready(self._shared[self._next]):
            self._reduce(self._shared[self._next])
            self._next += 1

    def _is_ready(self, gradient: ChunkGradient) -> bool:
        # Under reentrant checkpointing, each of a unit's several calls brings its own gradient.
        return gradient.is_full and not self._calls.will_be_repeated(gradient.chunk)

    def _reduce(self, gradient: ChunkGradient) -> None:
        """Start a reduction, and finish those of earlier units, which should be complete, to free their inputs."""
        unsure = gradient in self._in_parts or self._calls.is_unsure(gradient.chunk)
        if not gradient.is_full:  # the end of a backward, perhaps of a nested one
            unsure |= not self._calls.is_over(gradient.chunk)
        self._reduced.add(gradient)
        gradient.reduce(self.kind, unsure=unsure)
        self._under_way.append((self._runtime.place, gradient))
        while self._under_way and self._ends(*self._under_way[0]):
            self._collect_first()

    def _ends(self, place: int, gradient: ChunkGradient) -> bool:
        """Return True if the oldest reduction should be finished now.

        A compiled block's chunks are ready at the same time: finishing the first when the last one starts would stall.
        """
        if not gradient.is_pending or place < self._runtime.place or len(self._under_way) > _MOST_UNDER_WAY:
            return True
        free = gradient.chunk.memory.compute.free_bytes
        return len(self._under_way) > 2 and free is not None and free < 2 * self._largest_bytes

    def collect_earlier(self) -> None:
        """Finish reductions that overlapped with a unit's backward, or with one of the next forward, and free their inputs.

        The next reduction would finish them too, but it may come much later: for a chunk of several units, or in another
        micro-step.
        """
        if self.capture is not None:
            return  # nothing is pending
        if self._left and self._runtime.computes_since(0):
            for gradient in self._left:
                gradient.collect()
            self._left.clear()
        while self._under_way and self._runtime.computes_since(self._under_way[0][0]):
            self._collect_first()

    def _collect_first(self) -> None:
        self._collect(self._under_way.popleft()[1])

    def _collect(self, gradient: ChunkGradient) -> None:
        gradient.collect()
        if self.capture is not None:
            self.capture.note(partial(self._offer, gradient))
        self._offer(gradient)

    def _offer(self, gradient: ChunkGradient) -> None:
        """Let the optimizer step with a complete gradient, if it does that in this backward."""
        if self.kind == "final" and self._early is not None:
            self._early.offer(gradient)
        elif (speculative := self._speculating) is not None:
            speculative.offer(gradient)

    def replayed(self) -> None:
        """Record that a replay has passed on all gradients of a backward."""
        self._came = True

    def _ended(self) -> None:
        self._copy_noted()
        late = [gradient for gradient in self._all if gradient in self._reduced and gradient.has_late_parts]
        for gradient in [*(each for each in self._all if each not in self._reduced), *late]:
            self._reduce(gradient)
        if self.kind == "final" or self._speculating is not None:
            while self._under_way:
                self._collect_first()
        self._left = [gradient for _, gradient in self._under_way if gradient.is_pending]
        self._reset()
        for gradient in self._gradients.values():
            gradient.begin()

    @property
    def came(self) -> bool:
        """True if the backward has reached a parameter."""
        return self._came

    def end(self) -> None:
        """End a backward. A backward that reached no parameter still takes part in the reductions."""
        if not self._came:
            self._came = True
            self._ended()

    def _reset(self) -> None:
        self._under_way.clear()
        self._in_parts.clear()
        self._noted.clear()
        self._noted_bytes = 0
        self._full.clear()
        self._reduced.clear()
        self._next, self._in_backward = 0, False

    # -- afterwards ---------------------------------------------------------------------------------------------

    def reduce_rest(self) -> None:
        """Reduce the gradients that backwards other than the last have accumulated. All ranks must call.

        Only two are on the device at a time: their inputs are gradients of whole chunks, which may come from the host.
        """
        under_way: deque[ChunkGradient] = deque()
        for gradient in self._all:
            gradient.reduce("last")
            gradient.begin()
            under_way.append(gradient)
            if len(under_way) > _REST_UNDER_WAY:
                under_way.popleft().collect()

    def shards(self) -> dict[Chunk, Tensor]:
        """Return the complete gradient of every chunk, on the device of its optimizer state."""
        return {chunk: gradient.finish() for chunk, gradient in self._gradients.items()}

    @property
    def steps_early(self) -> bool:
        """True if the last backward stepped chunks."""
        return self.kind == "final"

    def complete(self) -> None:
        """Complete all gradients after the backward; after a final one, complete or queue all steps."""
        if self._early is not None and self.steps_early:
            self._early.finish(self._all)
        else:
            self.shards()

    def norm(self, norm_type: float, measure: Callable[[Chunk, float, Tensor], Tensor], everyone: Group) -> Tensor:
        """Return the norm of the whole model's gradient: float64, the same on every rank.

        Args:
            norm_type: 2.0, 1.0 or math.inf.
            measure: computes this rank's part of it from a chunk's shard.
            everyone: the group of all ranks.

        Raises:
            ChunkError: for a norm other than 2 of gradients that were already consumed.
        """
        sums = []
        for chunk, gradient in self._gradients.items():
            if gradient.is_consumed and norm_type != 2.0:
                raise ChunkError(
                    f"the {norm_type:g}-norm of gradients was asked for, and each was stepped with as soon as it was complete: "
                    "ask for the 2-norm, or do not make the backward a 'final' one"
                )
            shard = None if gradient.is_consumed else gradient.finish()
            known = gradient.measured if norm_type == 2.0 else None
            if known is None and shard is not None:
                known = measure(chunk, norm_type, shard)
            sums += [] if known is None else [known]
        return total_norm(sums, norm_type, everyone, self._device)

    def changed(self) -> None:
        """Drop the measured norms, because gradients were changed in place."""
        for gradient in self._gradients.values():
            gradient.measured = None

    def used(self) -> set[str]:
        """Return the names of the parameters that had a gradient on some rank. All ranks must call."""
        shared: dict[tuple[int, ...], list[Chunk]] = {}  # chunks by the ranks that share them, for one collective each
        for chunk in self._gradients:
            shared.setdefault(chunk.group.ranks, []).append(chunk)
        found: set[str] = set()
        for chunks in shared.values():
            names = [name for chunk in chunks for name in chunk.spec.names]
            mine = [place in self._gradients[c].used for c in chunks for place in range(len(c.parameters))]
            if chunks[0].group.size > 1:
                mine = Flags(mine, chunks[0].group, self._device).read()
            found.update(name for name, used in zip(names, mine, strict=True) if used)
        return found

    def forget(self) -> None:
        """Drop all gradients."""
        if self._early is not None:
            self._early.check()
            self._early.forget()
        if self._speculative is not None:
            self._speculative.drop()
        for gradient in self._gradients.values():
            gradient.clear()

    def abandon(self) -> None:
        """Drop all gradients after a backward that raised."""
        self._left.clear()
        self._reset()
        self.forget()

    def close(self) -> None:
        """Remove the hooks and release all memory."""
        for handle in self._handles:
            handle.remove()
        for gradient in self._gradients.values():
            gradient.close()
        if self._early is not None:
            self._early.close()
