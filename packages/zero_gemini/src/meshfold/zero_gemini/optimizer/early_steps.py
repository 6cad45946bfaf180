"""Early steps: chunks are stepped while backward runs, if nothing needs all gradients before the step.

A chunk is stepped once its gradient is complete on this rank and nothing in this backward reads its parameters any more. All units
that compute with them have then ended as often as they were called (:meth:`OpenCalls.is_over
<meshfold.zero_gemini.runtime.open_calls.OpenCalls.is_over>`). So neither a second use nor a recomputation sees the new values. On
the device it is stepped at once. For one on the host the gradient goes through a ring of two buffers, and the step runs in parallel
with the backward. Chunks that may still be read until the end of backward are stepped then.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.chunks.host_gradients import GradientRing
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.memory.copies import Arrival, copy_to_host
from meshfold.zero_gemini.optimizer.interface import EarlyStepper
from meshfold.zero_gemini.runtime.open_calls import OpenCalls

WAITING = 2
"""Gradients, besides those of one unit's chunks, that may wait on the device until their chunks are no longer read."""


class EarlySteps:
    """Controller of early steps, one chunk at a time.

    Attributes:
        ring: buffers for gradients of chunks on the host.
        is_half: some chunks have made the current step, and others may not have.
    """

    def __init__(self, stepper: EarlyStepper, calls: OpenCalls, memory: Memory) -> None:
        """Args:
        stepper: steps a chunk.
        calls: knows which tensors are still read.
        memory: for the ring.
        """
        self._stepper, self._calls, self._memory = stepper, calls, memory
        self.ring = GradientRing(memory)
        self._waiting: list[ChunkGradient] = []
        self.is_half = False

    def begin(self, gradients: Iterable[ChunkGradient]) -> None:
        """Prepare for a backward.

        Args:
            gradients: of all chunks, in about the order in which they will be complete.

        Raises:
            OutOfBudget: if the host has no memory for the ring; nothing has changed then.
        """
        gradients = list(gradients)
        through = [g for g in gradients if g.tier != "device" and not g.has_buffer]
        self.ring.fit(max((g.chunk.spec.shard_elems * g.dtype.itemsize for g in through), default=0))
        self._stepper.begin_steps([g.chunk for g in gradients])

    def offer(self, gradient: ChunkGradient) -> None:
        """Accept a gradient that is complete on this rank so far."""
        if gradient.is_consumed or gradient in self._waiting:
            return
        if not gradient.is_settled:
            gradient.offload()  # more may come: keep what there is
            return
        self._waiting.append(gradient)
        self.go()

    def go(self) -> None:
        """Step the chunks that can be stepped."""
        for gradient in [*self._waiting]:
            if self._calls.is_over(gradient.chunk):
                self._waiting.remove(gradient)
                self._step(gradient)
        while len(self._waiting) > self._calls.most_chunks + WAITING:
            self._waiting.pop(0).offload()

    def finish(self, gradients: Iterable[ChunkGradient]) -> None:
        """Step the remaining chunks, after the backward."""
        self._waiting.clear()
        for gradient in gradients:
            gradient.collect()
            if not gradient.is_consumed:
                self._step(gradient)

    def end(self) -> None:
        """Record that all chunks have made the step."""
        self._stepper.end_steps()
        self.is_half = False

    def forget(self) -> None:
        """Forget a backward that was aborted before any step."""
        self._waiting.clear()

    def check(self) -> None:
        """Check that the last step was complete.

        Raises:
            ChunkError: if a step was aborted in the middle.
        """
        if self.is_half:
            raise ChunkError(
                "the last backward failed after some chunks had made their optimizer step (without clipping, chunks are stepped "
                "during backward), so training cannot continue from here: build the engine again and resume from the last "
                "checkpoint"
            )

    def close(self) -> None:
        """Release the ring's memory."""
        self._waiting.clear()
        self.ring.close()

    def _step(self, gradient: ChunkGradient) -> None:
        chunk, used = gradient.chunk, gradient.names_used
        if gradient.has_buffer:  # sums over micro-steps are kept there
            gradient.offload()
        block = gradient.hand_out()
        self.is_half = True
        if block is None:
            assert gradient.shard is not None  # offloaded above
            self._stepper.step_one(chunk, gradient.shard, used, ready=gradient.on_its_way())
            gradient.lend()
        elif gradient.tier == "device":
            self._stepper.step_one(chunk, block.tensor, used, ready=Arrival())
            block.free()
        else:
            buffer = self.ring.lend(block.tensor.numel(), gradient.dtype, partial(self._stepper.done_with, chunk))
            arrived = copy_to_host(block.tensor, buffer, chunk.device)
            block.free()
            self._stepper.step_one(chunk, buffer, used, ready=Arrival(arrived))
