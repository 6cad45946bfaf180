"""Steps on trial: made before it is known what gradients count times, into second copies; kept if they count as expected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.optimizer.cpu_executor import Worker
from meshfold.zero_gemini.optimizer.gpu_streaming import GpuStreaming
from meshfold.zero_gemini.optimizer.kernel_runs import ChunkStep


@dataclass(eq=False)
class _SpeculativeUpdate:
    """A step that may not count; what is no longer wanted is not begun."""

    step: ChunkStep
    wanted: bool = True

    def is_wanted(self) -> bool:
        return self.wanted


class SpeculativeUpdates:
    """The steps on trial of one optimizer, each in turn open, then kept or dropped, and if kept landed."""

    def __init__(self, worker: Worker) -> None:
        """Args:
        worker: makes them.
        """
        self._worker = worker
        self._open: dict[Chunk, _SpeculativeUpdate] = {}
        self._kept: dict[Chunk, _SpeculativeUpdate] = {}

    @property
    def open(self) -> Collection[Chunk]:
        """Chunks with a step of which it is not known whether it counts."""
        return self._open.keys()

    def begin(
        self, chunk: Chunk, step: ChunkStep, ready: Callable[[], None], passage: GpuStreaming | None
    ) -> None:
        """Make a step of a chunk that has a second copy, and no step that is open or kept.

        Args:
            chunk: which.
            step: of all its shard.
            ready: returns when the gradient is there.
            passage: through which the device may step it.
        """
        self._open[chunk] = trial = _SpeculativeUpdate(step)
        self._worker.submit({chunk: step.on_trial(ready, trial.is_wanted, passage)}, [])

    def keep(self, steps: Mapping[Chunk, ChunkStep]) -> set[Chunk]:
        """Return the chunks whose speculative step is the step to make; drop those of all others."""
        kept = {
            chunk: trial
            for chunk, trial in self._open.items()
            if chunk in steps and trial.step.does_as(steps[chunk])
        }
        for chunk in kept:
            del self._open[chunk]
        self.drop()
        self._kept.update(kept)
        return set(kept)

    def drop(self) -> None:
        """Forget all that are open: their chunks are what they were before."""
        for trial in self._open.values():
            trial.wanted = False
        while self._open:
            self._worker.wait_parameters(self._open.popitem()[0])

    def land(self, chunk: Chunk) -> None:
        """After a chunk's step was waited for: let the second copy be what counts, if it was on trial and kept."""
        trial = self._kept.pop(chunk, None)
        if trial is not None:
            trial.step.held.exchange()

    def land_all(self) -> None:
        """The same of all chunks."""
        for chunk in [*self._kept]:
            self.land(chunk)
