"""Early steps of an optimizer of torch that has a disk: each chunk is stepped by itself, once its gradient is complete.

Chunks on disk and on the host are stepped in another thread, beside the backward and the next forward, as Adam's are; chunks on the
device at once. A chunk is stepped by a twin of the optimizer that has only its parameters and the settings from before the
backward. The optimizer itself does not change meanwhile, and a scheduler may set the next step's rate while steps are pending. When
the backward is over, the optimizer itself steps without gradients, so that its hooks are called once a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import Faults
from meshfold.zero_gemini.optimizer.cpu_executor import Halves, Worker
from meshfold.zero_gemini.optimizer.disk_buffers import Piece
from meshfold.zero_gemini.optimizer.disk_steps import DiskSteps
from meshfold.zero_gemini.optimizer.kernel_runs import StepTimer
from meshfold.zero_gemini.optimizer.master_weights import Weights
from meshfold.zero_gemini.optimizer.twins import settings_of, twin_of


class StepsInBackward:
    """See :class:`meshfold.zero_gemini.optimizer.interface.EarlyStepper`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        disk: DiskSteps,
        weights: Mapping[Chunk, Weights],
        faults: Faults,
        timings: StepTimer,
        count: Callable[[Chunk], None],
    ) -> None:
        """Args:
        optimizer: elementwise; its step changes only its state, and draws no random numbers.
        disk: the chunks on disk.
        weights: master weights of all chunks.
        faults: keeps the error of a pending step, which cannot raise in the middle of a collective.
        timings: of steps.
        count: called with each chunk that was stepped, to count its state's memory.
        """
        self._optimizer, self._disk, self._weights = optimizer, disk, weights
        self._faults, self._timings, self._count = faults, timings, count
        self._worker = Worker()
        self._settings: list[dict[str, Any]] = []
        self._coming: list[Piece] = []

    @property
    def failed(self) -> bool:
        """Return True if a failed step has been reported."""
        return self._worker.failed

    def begin_steps(self, chunks: Sequence[Chunk]) -> None:
        for chunk in self._weights:
            chunk.wait_step()  # chunks unused in this step may still have a pending one
        self._settings = copy.deepcopy(settings_of(self._optimizer))
        self._coming = [piece for chunk in chunks if (held := self._disk.held.get(chunk)) for piece in held.pieces]
        if self._coming:
            self._worker.submit({}, [], partial(self._disk.disk.ring.expect, self._coming))

    def step_one(self, chunk: Chunk, gradient: Tensor, used: set[str], *, ready: Callable[[], None]) -> None:
        settings = self._settings
        if self._weights[chunk].place == "device":
            ready()
            self._step_in_memory(chunk, gradient, used, settings)
            self._count(chunk)
            return

        def work() -> None:
            ready()
            if chunk in self._disk.held:
                self._disk.step_one(chunk, gradient, used, settings)
            else:
                with self._timings.clock("whole", gradient.numel()):
                    self._step_in_memory(chunk, gradient, used, settings)
            self._disk.disk.ring.advance()

        self._worker.submit({chunk: Halves(work)}, [])
        # On every rank of the chunk's group, even if a rank's shard is empty: publishing is a collective.
        chunk.promise_step(_StepOfChunk(self, chunk))

    def end_steps(self) -> None:
        if self._coming:
            self._worker.submit({}, [], partial(self._get_ready, self._coming))
        self._optimizer.step()

    def _get_ready(self, pieces: list[Piece]) -> None:
        """Start reading the pieces that the next step needs first."""
        self._disk.disk.ring.settle()
        self._disk.disk.ring.expect(pieces)

    def _step_in_memory(
        self, chunk: Chunk, gradient: Tensor, used: set[str], settings: Sequence[Mapping[str, Any]]
    ) -> None:
        """Step on a chunk whose state is in memory."""
        weights, state = self._weights[chunk], self._optimizer.state
        gradient = gradient.to(weights.dtype)
        of: dict[Tensor, nn.Parameter] = {}
        for part in chunk.slices:
            if part.name in used:
                parameter = weights.parameters[part.name]
                of[parameter] = nn.Parameter(parameter.detach())
                of[parameter].grad = gradient[part.shard_start : part.shard_start + part.length]
        if not of:
            return
        twin = twin_of(self._optimizer, settings, of)
        twin.state.update({mine: state[parameter] for parameter, mine in of.items() if parameter in state})
        twin.step()
        state.update({parameter: twin.state[mine] for parameter, mine in of.items() if mine in twin.state})

    # -- pending steps ------------------------------------------------------------------------------------------

    def is_done(self, chunk: Chunk) -> bool:
        """Return True if a chunk's step is over."""
        return self._worker.is_done(chunk)

    def wait(self, chunk: Chunk) -> bool:
        """Wait for a chunk's step; return True if it succeeded."""

        def ended() -> None:
            self._worker.wait_parameters(chunk)
            self._count(chunk)

        return self._faults.keep(ended)

    def land(self, chunk: Chunk) -> None:
        """Publish a chunk that was stepped."""
        self._weights[chunk].show()

    def done_with(self, chunk: Chunk) -> None:
        self._worker.release_gradient(chunk, self._faults)

    def finish(self) -> bool:
        """Finish all pending steps; return True if they succeeded."""
        for chunk in self._weights:
            chunk.wait_step()
        return self._faults.keep(self._worker.wait)

    def close(self) -> None:
        """End the thread, and forget pending steps."""
        self._worker.close()
        for chunk in self._weights:
            chunk.drop_step()


class _StepOfChunk:
    """Pending step of a chunk (:class:`meshfold.zero_gemini.chunks.chunk.PendingStep`)."""

    def __init__(self, steps: StepsInBackward, chunk: Chunk) -> None:
        self._steps, self._chunk = steps, chunk

    def is_done(self) -> bool:
        return self._steps.is_done(self._chunk)

    def wait(self) -> bool:
        return self._steps.wait(self._chunk)

    def land(self) -> None:
        self._steps.land(self._chunk)
