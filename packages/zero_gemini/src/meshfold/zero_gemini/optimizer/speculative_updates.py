"""Speculative updates, made into shadow copies before the gradients' factor is known, and kept if it is as expected."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.memory.copies import Arrival
from meshfold.zero_gemini.optimizer.cpu_executor import Worker
from meshfold.zero_gemini.optimizer.gpu_streaming import GpuStreaming
from meshfold.zero_gemini.optimizer.kernel_runs import ChunkStep


@dataclass(eq=False)
class _SpeculativeUpdate:
    """Step that may be dropped; it is not started if it is no longer needed."""

    step: ChunkStep
    wanted: bool = True

    def is_wanted(self) -> bool:
        return self.wanted


class SpeculativeUpdates:
    """Speculative updates of one optimizer: each is open, then kept or dropped, and if kept, swapped in."""

    def __init__(self, worker: Worker) -> None:
        """Args:
        worker: makes them.
        """
        self._worker = worker
        self._open: dict[Chunk, _SpeculativeUpdate] = {}
        self._kept: dict[Chunk, _SpeculativeUpdate] = {}

    @property
    def open(self) -> Collection[Chunk]:
        """Chunks whose speculative step is still open."""
        return self._open.keys()

    def begin(self, chunk: Chunk, step: ChunkStep, ready: Arrival, streaming: GpuStreaming | None) -> None:
        """Make a step of a chunk that has a shadow copy, and no open or kept step.

        Args:
            chunk: which.
            step: its runs cover the whole shard.
            ready: waits until the gradient is on the host.
            streaming: GPU streaming that may step it.
        """
        self._open[chunk] = update = _SpeculativeUpdate(step)
        self._worker.submit_first(chunk, step.speculative(ready, update.is_wanted, streaming))

    def keep(self, steps: Mapping[Chunk, ChunkStep]) -> set[Chunk]:
        """Return the chunks whose speculative step equals the real one; drop the others' steps."""
        kept = {
            chunk: update
            for chunk, update in self._open.items()
            if chunk in steps and update.step.does_as(steps[chunk])
        }
        for chunk in kept:
            del self._open[chunk]
        self.drop()
        self._kept.update(kept)
        return set(kept)

    def drop(self) -> None:
        """Drop all open steps; their chunks are unchanged."""
        for update in self._open.values():
            update.wanted = False
        while self._open:
            self._worker.wait_parameters(self._open.popitem()[0])

    def land(self, chunk: Chunk) -> None:
        """Swap in a chunk's shadow copy if its speculative update was kept. Wait for the step before."""
        update = self._kept.pop(chunk, None)
        if update is not None:
            update.step.held.exchange()

    def land_all(self) -> None:
        """Call :meth:`land` for all chunks."""
        for chunk in [*self._kept]:
            self.land(chunk)
