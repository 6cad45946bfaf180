"""Which gradients a step has completed, so that they can be summed over the data axes while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from meshfold.pipeline.runtime.partition import Cut
from meshfold.pipeline.runtime.tied_gradients import TiedGradients

Reduce = Callable[[Sequence[tuple[str, nn.Parameter]]], None]
"""takes parameters up, with their names, whose gradients are whole"""


class WholeGradients:
    """Hands parameters on as soon as no other stage of this rank, and no other rank, adds to their gradients."""

    def __init__(self, cut: Cut, ties: TiedGradients, reduce: Reduce) -> None:
        """Args:
        cut: the model.
        ties: parameters that other ranks keep as well: theirs are whole once they were summed.
        reduce: takes them up.
        """
        self._cut, self._ties, self._reduce = cut, ties, reduce
        self._tied = {tie.name for tie in cut.ties}
        self._unfinished: set[int] = set()

    def begin(self) -> None:
        """A step begins: nothing is whole."""
        self._unfinished = set(self._cut.stages)

    def of_stage(self, stage: int) -> None:
        """All micro-batches of a stage had their W."""
        self._unfinished.discard(stage)
        done = [
            (name, parameter)
            for name, parameter in self._cut.named_parameters()
            if stage in (stages := self._cut.users[name])
            and not stages & self._unfinished
            and name not in self._tied
        ]
        if done:
            self._reduce(done)

    def of_ties(self) -> None:
        """Those of several ranks were summed."""
        if self._ties.parameters:
            named = zip(self._ties.ties, self._ties.parameters, strict=True)
            self._reduce([(tie.name, parameter) for tie, parameter in named])
