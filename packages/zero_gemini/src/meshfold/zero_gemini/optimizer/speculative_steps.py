"""Speculative steps: chunks are stepped while backward runs, if gradients are clipped by norm and rarely exceed it.

The norm is known when backward is over, and a step that waits for it can only overlap with the next forward. But if gradients
were not scaled down in the last steps, they probably will not be in this one. So a chunk with state on the host is stepped as soon
as its gradient arrives, into a shadow copy (:mod:`meshfold.zero_gemini.optimizer.master_weights`), with the last two steps' factor.
If the factor is right, the copy is kept; else it is dropped, and the chunk is stepped again. Both ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.optimizer import AdamStepper

SPECULATE_AFTER_STEPS = 2
"""Steps in a row with the same gradient scale after which the next step is made speculatively."""


class SpeculativeSteps:
    """Controller of speculative steps.

    Attributes:
        alike: consecutive steps, up to the last, with equal gradient factors; 0 if speculative steps are useless.
    """

    def __init__(self, stepper: AdamStepper) -> None:
        """Args:
        stepper: makes the steps.
        """
        self._stepper = stepper
        self._on = self._in_vain = False
        self._factor: float | None = None  # the last step's
        self._sums: dict[ChunkGradient, int] = {}  # number of sums of each gradient when it was stepped
        self.alike = 0

    def keep_copies(self, of: Collection[Chunk]) -> bool:
        """Allocate the shadow copies of these chunks, and free those of others. No step may be pending.

        Returns:
            True if there are shadow copies; False also if the host has no memory for them.
        """
        self._on = self._stepper.keep_second_copies(of)
        return self._on

    @property
    def are_made(self) -> bool:
        """Return True if the next step is made speculatively."""
        return self._on and self.alike >= SPECULATE_AFTER_STEPS

    def begin(self) -> None:
        """Prepare for a backward that may be a step's last, in which speculative steps are made."""
        if self._sums:
            self.give_up()
        else:
            self._stepper.begin_speculative()

    def offer(self, gradient: ChunkGradient) -> None:
        """Accept a gradient that seems complete in such a backward, and is being copied to the host."""
        if self._factor is None or gradient.tier != "host" or gradient.shard is None:
            return
        chunk = gradient.chunk
        if gradient in self._sums:  # a second backward added to a gradient that was already used
            self.give_up()
            return
        used = {chunk.spec.names[place] for place in gradient.used}
        if self._stepper.try_step(chunk, gradient.shard, used, factor=self._factor, ready=gradient.arrival()):
            gradient.lend()
            self._sums[gradient] = gradient.sums

    def check(self) -> None:
        """Discard speculative steps if gradients have changed since they were used. Call it before a step."""
        if any(gradient.sums != sums for gradient, sums in self._sums.items()):
            self.give_up()

    def learn(self, scale: float | Tensor) -> None:
        """Record the gradient factor after a step."""
        if self._in_vain:
            return
        factor = float(scale)
        self.alike = self.alike + 1 if factor == self._factor else 1
        self._factor = factor

    def drop(self) -> None:
        """Reset after a step, or if none follows the speculative steps."""
        self._sums.clear()
        self._stepper.drop_speculative()

    def give_up(self) -> None:
        """Disable speculative steps from now on, since gradients are changed between backward and step."""
        self._in_vain, self.alike = True, 0
        self.drop()
