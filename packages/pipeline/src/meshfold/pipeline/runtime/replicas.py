"""Pipelines side by side, one for each data coordinate, whose ranks share parameters (ZeRO stage 3).

Each use of a stage then gathers its parameters, a collective over the data coordinates: they must all use their stages
equally often, though one may have fewer rows in a smaller last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from meshfold.pipeline.runtime.microbatch import Microbatch


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """What is agreed with the other pipelines; all of them must come.

    Attributes:
        agree: from how many micro-batches this pipeline's batch has to how many all have, the most of any. None: each has
            its own.
        looking: around forwards that one pipeline may make and another not, of which only the shapes are wanted.
    """

    agree: Callable[[int], int] | None = None
    looking: Callable[[], AbstractContextManager[None]] = nullcontext

    def filled(self, works: Sequence[Microbatch]) -> list[Microbatch]:
        """As many micro-batches as all have: the last one again, which counts nothing then."""
        if self.agree is None:
            return [*works]
        nothing = replace(works[-1], weight=torch.zeros_like(works[-1].weight))
        return [*works, *[nothing] * (self.agree(len(works)) - len(works))]


NO_REPLICAS = Replicas()
