"""Gemini: a model's parameters, gradients and optimizer state in chunks, sharded over the ranks that share its batch.

Stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the parameters too (Rajbhandari et al. 2020, arXiv
1910.02054). Shards may live in the host's memory and visit the device.

A training step::

    gemini.begin(last=True)
    loss_of(model(batch)).backward()     # units are gathered, chunks of gradients reduced, as they come
    norm = gemini.clip(1.0)
    gemini.step()

Life of a chunk during a step:

1. ``begin``: this step expects the order of units of the last one.
2. Forward reaches a unit that uses the chunk (:mod:`~meshfold.zero_gemini.runtime.module_hooks`). It waits for the optimizer if
   that still works on the shard (``Chunk.wait_step``), then gathers the shards (``Chunk.gather``, ``Chunk.wait``). The next unit's
   chunks start to be gathered, and chunks that no unit inside needs are released.
3. Backward comes to the unit: the same again. Each parameter's gradient is collected as autograd computes it. Once all have
   arrived, the chunk's gradients are summed over the group, measured for the norm, and sent to the memory of the chunk's state
   (:mod:`~meshfold.zero_gemini.sharded_model.reducer`, :mod:`~meshfold.zero_gemini.chunks.gradient`).
4. In a ``"final"`` backward, if nothing needs all gradients first, the chunk is stepped as soon as nothing reads it any
   more (:mod:`~meshfold.zero_gemini.optimizer.early_steps`).
5. Otherwise ``finish`` and ``clip`` wait for all gradients and set their factor, and ``step`` steps: on the device at once, on the
   host in parallel with the next forward and backward (:mod:`~meshfold.zero_gemini.optimizer.cpu_executor`). The host updates
   parameters before that forward needs them, and moments during that backward. Until then its step is *pending*. With everything on
   the device the chunks that the next forward needs first are stepped first, and gathered while the others are stepped.
6. ``forget``: gradients are dropped. The next use of a chunk with a pending step is 2. again.

:mod:`~meshfold.zero_gemini.sharded_model.chunked_model` builds all this from a model,
:mod:`~meshfold.zero_gemini.sharded_model.parameter_values` reads and writes it between steps, and
:mod:`~meshfold.zero_gemini.sharded_model.moves` moves chunks to other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from meshfold.mesh import with_old_names
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.chunk_parameters import Matrices
from meshfold.zero_gemini.chunks.fp8_gather import Operands
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.chunks.placement import ChunkPlacement, Move
from meshfold.zero_gemini.chunks.states import BackwardRole
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.norm import power_sum, total_norm
from meshfold.zero_gemini.runtime.captured_moves import CapturedMoves
from meshfold.zero_gemini.runtime.module_hooks import Runtime
from meshfold.zero_gemini.sharded_model.chunked_model import ChunkedModel
from meshfold.zero_gemini.sharded_model.reducer import GradientFlow


@with_old_names(
    {
        "homes": "placements",
        "pass_through": "stream_on_gpu",
        "rehome": "move",
        "step_on_trial": "step_speculatively",
        "staying_bytes": "gather_cache_bytes",
        "true_dtype": "master_dtype",
    },
    arguments={"homes": "placements"},
)
class Gemini(ChunkedModel):
    """Holds a model in chunks and trains it.

    Attributes:
        chunks: all of them, in order of registration.
        group_names: names of the parameters in each of the optimizer's groups.
        holds_gradients: True if the last step began when all gradients had arrived; else chunks were stepped as theirs arrived.
    """

    _scale: float | Tensor = 1.0  # factor on gradients
    _finished = False  # gradients are complete

    # -- a step, in order --------------------------------------------------------------------------------------

    def begin(self, *, last: bool) -> None:
        """Start a micro-step; ``last``: it is the last of an accumulation.

        Raises:
            ChunkError: once a step was aborted in the middle, see :meth:`expect`.
        """
        self._pending.check()
        if self._flow.was_broken_off:
            self.abandon()
        if self._finished:
            self.forget()
        self._flow.expect("last" if last else "more")
        self._runtime.begin_step()

    def expect(self, kind: BackwardRole) -> None:
        """Set the role of the next backward, if ``begin`` could not know it.

        In a ``"final"`` one Adam, and with a disk other optimizers of elements, steps chunks as soon as their gradients arrive, and
        holds none; the norm is known nevertheless, after ``finish``. If it is aborted when some chunks have made the step,
        everything that trains, reads or moves the model raises from then on: it is between two steps. Other optimizers step when
        all gradients have arrived.
        """
        self._flow.expect(kind)

    def end_backward(self) -> None:
        """End a backward that other ranks made too: if it reached no parameter of this rank, all gradients count as zero.

        Without this call such a rank, whose loss depends on no trained parameter, would be missing from the reductions.

        Raises:
            ChunkError: for such a rank if parameters are gathered, since the others have gathered them in their backward.
        """
        if not self._flow.came and any(chunk.group.size > 1 and not chunk.resident for chunk in self.chunks):
            raise ChunkError(
                "this rank's loss depends on no parameter that is trained, and with stage 3 all ranks gather parameters in their "
                "backward: let it depend on the model's output, as loss + 0 * output.sum() does, or use stage 2"
            )
        self._flow.end()

    def finish(self, factor: float = 1.0) -> None:
        """End the last backward: gradients are complete, and are scaled by the factor.

        Raises:
            DiskError: on all ranks, if the last step failed on one of them, as in :meth:`flush`.
        """
        self._flow.complete()
        if self._flow.steps_early:
            self._keep_as_they_are(factor == 1.0, f"to count {factor} times")
            self._pending.agree()
        else:
            self.flush()
        self._scale, self._finished = factor, True

    def norm(self, norm_type: float = 2.0, names: Collection[str] | None = None) -> Tensor:
        """Return the norm of the whole model's gradient: float64, the same on every rank.

        Args:
            norm_type: which.
            names: only of these parameters' gradients, which are then complete; None: of all.
        """
        everyone = self._mesh.group(*self._mesh.names)
        if names is not None and not self._is_all(names):
            sums = [power_sum(grad, holders, norm_type) for grad, holders in self._grads(names, "measured")]
            return total_norm(sums, norm_type, everyone, self.memory.device) * self._scale
        if self._flow.steps_early:
            self._faults.check()
        else:
            self.flush()
        return self._flow.norm(norm_type, self._norms.power_sum, everyone) * self._scale

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient's norm to ``max_norm``, by torch's rule; return the norm before."""
        self._keep_as_they_are(not self._flow.steps_early, "to be clipped")
        norm = self.norm(norm_type)
        self._scale = self._scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm

    @torch.no_grad()
    def clip_value(self, bound: float) -> None:
        """Clamp every element of the scaled gradient to [-bound, bound]."""
        self.clamp(None, -bound, bound)

    @torch.no_grad()
    def clamp(self, names: Collection[str] | None, low: float | None, high: float | None) -> None:
        """Clamp every element of these parameters' gradients to [low, high]; None: of all."""
        scale = float(self._scale)
        bounds = [None if bound is None else bound / scale for bound in (low, high)]
        for grad in self._changing(names, "to be clipped"):
            grad.clamp_(*bounds)

    @torch.no_grad()
    def multiply(self, names: Collection[str] | None, factor: Tensor | float) -> None:
        """Scale these parameters' gradients by the factor; None: all."""
        if self._is_all(names):
            self._keep_as_they_are(not self._flow.steps_early, "to be multiplied")
            self._scale = self._scale * factor
            return
        for grad in self._changing(names, "to be multiplied"):
            grad.mul_(factor.to(grad) if isinstance(factor, Tensor) else factor)

    def _is_all(self, names: Collection[str] | None) -> bool:
        return names is None or set(names) >= {name for c in self._gradients for name in c.spec.names}

    def _changing(self, names: Collection[str] | None, what: str) -> Iterator[Tensor]:
        """Yield this rank's complete gradients of these parameters, to be changed in place; None: all of them, with padding."""
        if self._speculative is not None:
            self._speculative.give_up()
        for grad, _ in self._grads(names, what):
            yield grad
        self._flow.changed()

    def _grads(self, names: Collection[str] | None, what: str) -> Iterator[tuple[Tensor, int | Tensor]]:
        """Yield this rank's complete gradients, each with the number of ranks that hold the same elements."""
        self._keep_as_they_are(not self._flow.steps_early, what)
        self.flush()
        for chunk, shard in self._flow.shards().items():
            if names is None:
                yield shard, 1
                continue
            for part in chunk.slices:
                if part.name in names:
                    holders = self._facts[part.name].holders
                    if isinstance(holders, Tensor):
                        holders = holders[part.parameter_start : part.parameter_start + part.length]
                    yield shard[part.shard_start : part.shard_start + part.length], holders

    def step(self) -> None:
        """Step every shard, and publish the new weights to the model."""
        if self._stepper is None:
            raise ChunkError("this model has no optimizer: pass make_optimizer")
        self.holds_gradients = not self._flow.steps_early
        if self.holds_gradients:
            self.flush()
            if self._speculative is not None:
                self._speculative.check()
            ahead = self._step_all()
            if self._speculative is not None and any(chunk.step_is_pending for chunk in self.chunks):
                self._speculative.learn(self._scale)
            for gradient in self._gradients.values():
                gradient.hand_over()
        else:
            ahead = {}
            self._faults.check()
            self._flow.complete()
            self._pending.agree()
        self._pending.promised = any(map(self._pending.in_background, self.chunks))
        self._publish(promised=False, but=ahead)
        if self._early is not None and not self.holds_gradients:
            self._early.end()
        self.forget()

    def _step_all(self) -> Mapping[Chunk, Operands]:
        """Let the stepper step on every chunk; return those that are being gathered for the next step already."""
        shards, used = self._flow.shards(), self._flow.used()
        ahead = self._gathers_early()
        assert self._stepper is not None  # asked by ``step``
        adam = self._stepper.one_by_one
        if adam is None or not ahead:
            self._stepper.step(shards, self._scale, used)
            return {}

        def stepped(chunk: Chunk) -> None:
            if chunk in ahead:
                self._publish_one(chunk)
                self._runtime.gather_ahead(chunk, ahead[chunk])

        for chunk in ahead:
            if chunk not in shards:
                stepped(chunk)
        first = {chunk: shards[chunk] for chunk in ahead if chunk in shards}
        adam.step(first | shards, self._scale, used, stepped=stepped)
        return ahead

    def _gathers_early(self) -> dict[Chunk, Operands]:
        """Return the chunks that the next forward needs first, to be gathered while others are stepped.

        No chunks if memory is limited, or some are stepped in the background: plans count no gathered chunks during a step.
        """
        if self.memory.compute.free_bytes is not None or any(map(self._pending.in_background, self.chunks)):
            return {}
        return {
            chunk: operands
            for chunk, operands in self._runtime.gathers_first().items()
            if chunk.group.size > 1 and not chunk.resident
        }

    def forget(self) -> None:
        """Drop all gradients."""
        self._flow.forget()
        self._scale, self._finished = 1.0, False

    # -- a captured step ---------------------------------------------------------------------------------------

    def why_not_captured(self) -> str:
        """Return why forward and backward of a micro-step cannot be captured now, as a clause; empty if they can be."""
        if any(chunk.group.size > 1 for chunk in self.chunks):
            return "several ranks share its parameters, and collectives are not captured"
        if any(chunk.travels_in_fp8 for chunk in self.chunks):
            return "its parameters are gathered in fp8"
        if self._runtime.gather_cache.most_bytes:
            return "chunks stay gathered between two uses"
        return ""

    def begin_capture(self) -> None:
        """Finish pending steps, and release all chunks that are not resident, before the forward of a captured step."""
        self.flush()
        self._runtime.rest()

    @contextmanager
    def capturing(self, capture: CapturedMoves) -> Iterator[None]:
        """Context manager: capture the forward inside, or the backward, whose role is ``"last"``, with the moves of chunks."""
        parts: list[Runtime | GradientFlow | ChunkGradient] = [self._runtime, self._flow, *self._gradients.values()]
        capture.waiting = self.memory.waiting
        for part in parts:
            part.capture = capture
        try:
            with capture.capturing():
                yield
        finally:
            for part in parts:
                part.capture = None

    def replay(self, capture: CapturedMoves, *, backward: bool) -> None:
        """Run the captured forward again, or the backward, between ``begin`` and ``finish`` as an eager one."""
        with self._runtime.replaying(capture):
            capture.replay(int(backward))
        if backward:
            self._flow.replayed()

    def free_graphs_by(self, free: Callable[[bool], None] | None) -> None:
        """Call ``free`` before any other forward of the model, and with True before chunks move.

        A captured step keeps the memory of its activations until then.
        """
        self._runtime.needs_memory = free

    # -- what may happen on the way ----------------------------------------------------------------------------

    @property
    def is_half_stepped(self) -> bool:
        """Return True if some chunks have made the current step and others may not have."""
        return self._early is not None and self._early.is_half

    @property
    def takes(self) -> bool:
        """Return True if gradients that arrive now are used; otherwise they are dropped."""
        return self._flow.takes

    @takes.setter
    def takes(self, yes: bool) -> None:
        self._flow.takes = yes

    def reduce_rest(self) -> None:
        """Reduce the gradients left by earlier backwards. All ranks must call, before ``finish``."""
        self._flow.reduce_rest()

    def abandon(self) -> None:
        """Forget a micro-step that raised in the middle, with all gradients since the last step."""
        self._flow.abandon()
        self._runtime.abandon()
        self.forget()

    def _keep_as_they_are(self, yes: bool, what: str) -> None:
        if not yes:
            raise ChunkError(
                f"gradients were {what}, but a 'final' backward steps each chunk as soon as its gradient is complete: make the "
                "backward a 'last' one"
            )

    # -- between steps -----------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish the master weights to the model. All ranks must call; all raise if any could not write."""
        self._faults.agree()
        self._publish(promised=True)

    def _publish(self, *, promised: bool, but: Collection[Chunk] = ()) -> None:
        """Publish the master weights of all chunks but some; those with a pending step only if ``promised``."""
        shown = [chunk for chunk in self.chunks if (promised or not chunk.step_is_pending) and chunk not in but]
        for chunk in shown:
            self._publish_one(chunk)
        for chunk in shown:
            chunk.wait_if_resident()

    def _publish_one(self, chunk: Chunk) -> None:
        if self._stepper is not None and chunk in self._gradients:
            self._stepper.publish(chunk)
        else:
            chunk.publish()

    def move(self, placements: Mapping[Chunk, ChunkPlacement]) -> None:
        """Move chunks to other placements, between steps; training continues with the same bits. All ranks must call.

        They move one by one, so that memory does not run out on the way. A chunk that cannot be moved on
        one of the ranks stays where it was on all, and all raise.
        """
        if self._runtime.needs_memory is not None:
            self._runtime.needs_memory(True)
        self.flush()
        self.take_written()
        self.forget()
        self._runtime.rest()
        try:
            self._residents.move(placements)
        finally:  # even after an error some chunks have moved
            self._runtime.reread()

    def moves_to(self, placements: Mapping[Chunk, ChunkPlacement]) -> list[Move[tuple[Chunk, ChunkPlacement]]]:
        """Return the moves of chunks that :meth:`move` would make, with the bytes that each adds to device and host."""
        return self._residents.moves_to(placements)

    def bytes_of(self, chunk: Chunk) -> tuple[float, float]:
        """Return the bytes of a chunk's parameters on this rank, and of its optimizer state, 0 for a frozen one."""
        return self._residents.bytes_of(chunk)

    @property
    def gather_cache_bytes(self) -> int:
        """Set the limit, in bytes, of gathered chunks that stay on the device until their next use in the step.

        All ranks that share chunks must set the same, between steps. The caller releases them before the optimizer steps,
        by :meth:`rest`.
        """
        return self._runtime.gather_cache.most_bytes

    @gather_cache_bytes.setter
    def gather_cache_bytes(self, most: int) -> None:
        self._runtime.gather_cache.most_bytes = most

    def rest(self, *, unlearn: bool = False) -> None:
        """Release all chunks that are not resident.

        Args:
            unlearn: ignore the units that ran since the step began.
        """
        self._runtime.rest()
        if unlearn:
            self._runtime.unlearn()

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Context manager around forwards that need only shapes, possibly on some ranks only: nothing is gathered for them."""
        self.rest()
        self._runtime.is_quiet = True
        matrices: Matrices = {}
        for chunk in self.chunks:
            chunk.show_shapes(matrices)
        try:
            yield
        finally:
            for chunk in self.chunks:
                chunk.show_shapes(None)
            self._runtime.is_quiet = False

    def close(self) -> None:
        """Remove all hooks, and release what only training needs: gradients and the optimizer's state."""
        try:
            if self._stepper is not None and not self._faults.is_reported and not self.is_half_stepped:
                self.flush()
            if not self._faults.is_reported:
                self._runtime.rest()  # what was gathered for a next step: a collective that nobody waits for keeps its memory
        finally:  # also if a pending step failed
            self._runtime.close()
            self._flow.close()
            self._gradients.clear()
            if self._stepper is not None:
                self._stepper.close()
            for chunk in self.chunks:
                chunk.close()
