"""Optimizer steps that overlap with the next forward and backward: their end, and their errors on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import Faults
from meshfold.zero_gemini.optimizer.early_steps import EarlySteps
from meshfold.zero_gemini.optimizer.interface import Stepper


class PendingSteps:
    """Steps of a model's chunks that may not be complete.

    Attributes:
        promised: the outcome of the last step is not exchanged among the ranks yet.
    """

    def __init__(
        self, stepper: Stepper | None, chunks: Sequence[Chunk], faults: Faults, early: EarlySteps | None
    ) -> None:
        """Args:
        stepper: steps chunks; None without an optimizer.
        chunks: of the model.
        faults: errors of this rank and of the others.
        early: steps chunks in a final backward; None if the optimizer cannot.
        """
        self._stepper, self._chunks, self._faults, self._early = stepper, chunks, faults, early
        self.promised = False

    def in_background(self, chunk: Chunk) -> bool:
        """Return True if the optimizer steps a chunk in parallel with compute."""
        return self._stepper is not None and self._stepper.steps_in_background(chunk)

    def flush(self) -> None:
        """Finish every pending step. All ranks must call.

        Raises:
            DiskError: on all ranks, if a step failed on one of them; it names the rank and the cause. Every later call raises
                it too: training cannot continue.
        """
        self.check()
        if self._stepper is not None:
            self._stepper.finish()
            for chunk in self._chunks:
                chunk.wait_if_resident()
        self.agree()

    def check(self) -> None:
        """Raise the error that was reported to all ranks, or an error if a step was interrupted."""
        self._faults.check()
        if self._early is not None:
            self._early.check()

    def agree(self) -> None:
        """Finish the last step, and raise its errors on all ranks."""
        if self.promised:
            self.promised = False
            self._faults.agree()
