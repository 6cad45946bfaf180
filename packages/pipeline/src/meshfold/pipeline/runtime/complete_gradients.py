"""Which gradients a step has completed, so that they can be summed over the data axes while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from meshfold.pipeline.runtime.partition import Partition
from meshfold.pipeline.runtime.tied_gradients import TiedGradients

Reduce = Callable[[Sequence[tuple[str, nn.Parameter]]], None]
"""takes parameters up, with their names, whose gradients are whole"""


class CompleteGradients:
    """Hands parameters on as soon as no other stage of this rank, and no other rank, adds to their gradients."""

    def __init__(self, partition: Partition, ties: TiedGradients, reduce: Reduce) -> None:
        """Args:
        partition: the model.
        ties: parameters that other ranks keep as well: theirs are whole once they were summed.
        reduce: takes them up.
        """
        self._partition, self._ties, self._reduce = partition, ties, reduce
        self._tied = {tie.name for tie in partition.ties}
        self._unfinished: set[int] = set()

    def begin(self) -> None:
        """A step begins: nothing is whole."""
        self._unfinished = set(self._partition.stages)

    def of_stage(self, stage: int) -> None:
        """All micro-batches of a stage had their W."""
        self._unfinished.discard(stage)
        done = [
            (name, parameter)
            for name, parameter in self._partition.named_parameters()
            if stage in (stages := self._partition.users[name])
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
