"""Words that ranks split: under tensor parallelism each rank has the logits of some, and chooses among them before all agree.

Ranks exchange five numbers a row instead of the logits (:mod:`meshfold.kernels.word_choice`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from meshfold.mesh import Group, all_gather
from meshfold.tensor_parallel.layers import Linear


@dataclass(frozen=True)
class SplitWords:
    """The words of a rank.

    Attributes:
        head: makes logits.
        group: its ranks, in the order of their words.
        first: number of this rank's first word.
        count: of its words; further columns of its logits fill up.
    """

    head: Linear
    group: Group
    first: int
    count: int

    def gathered(self, part: Tensor) -> Tensor:
        """Return what all ranks' words say, ``ranks b 5``, from what this rank's say."""
        return all_gather(part.unsqueeze(0), self.group, 0)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager: the head returns the logits of this rank's words."""
        self.head.__dict__["whole"] = _unchanged
        try:
            yield
        finally:
            del self.head.__dict__["whole"]


def split_words(head: nn.Module | None) -> SplitWords | None:
    """Return the split of a head's words; None if every rank has all of them, or other ranks have other rows."""
    if not isinstance(head, Linear) or not head.makes_logits or head.stored != "nk":
        return None
    axes, plan = head.plan.y[head.plan.n], head.plan
    if head.mesh.size(*axes) == 1 or plan.y[plan.m] or plan.sums("y") or plan.extras("y"):
        return None
    each = head.own_words
    first = head.mesh.index(*axes) * each
    return SplitWords(head, head.mesh.group(*axes), first, min(max(head.out_features - first, 0), each))


def _unchanged(y: Tensor) -> Tensor:
    return y
