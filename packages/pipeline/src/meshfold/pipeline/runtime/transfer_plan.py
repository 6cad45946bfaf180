"""The arguments of blocks that stages send to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from meshfold.pipeline.errors import ChainError
from meshfold.pipeline.runtime.block_outputs import OutputForm


@dataclass(frozen=True)
class Slot:
    """An argument of a block that is sent between stages: its index among the leaves of (args, kwargs), shape and dtype."""

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Slots = tuple[Slot, ...]


@dataclass
class TransferPlan:
    """The arguments that are sent to each block, for one shape of input.

    Attributes:
        slots: by block, of those that are called.
        forms: the output form of each of them.
    """

    slots: dict[int, Slots] = field(default_factory=dict)
    forms: dict[int, OutputForm] = field(default_factory=dict)

    def into(self, first: int) -> Slots:
        """Return the tensors sent to a stage that begins with a block: the arguments of the first block called from there on."""
        return self.slots[min(index for index in self.slots if index >= first)]

    def check(self, bounds: Sequence[int], blocks: str) -> None:
        """Raise a ChainError for a stage if none of its blocks is called.

        Args:
            bounds: stage s has the blocks from bounds[s] to bounds[s + 1], excluded.
            blocks: name of their list.
        """
        for stage, (first, stop) in enumerate(pairwise(bounds)):
            if not any(first <= index < stop for index in self.slots):
                raise ChainError(
                    f"stage {stage} has blocks {first} to {stop - 1} of {blocks or 'the model'}, but the model's forward calls "
                    f"none of them (it calls {', '.join(map(str, self.slots))}): use fewer stages, or remove uncalled blocks "
                    "from the list"
                )
