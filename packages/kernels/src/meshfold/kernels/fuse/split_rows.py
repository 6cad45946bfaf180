"""Rows of logits that ranks share: what a loss needs instead of gathering them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """The rows of logits that would be gathered, each rank having some of them.

    Attributes:
        numbers: of all rows in their order, with the shape of the logits but for a last dim of 1.
        targets: ``(m, ignore_index)`` to this rank's part of the targets of all rows; it raises on every rank for one that is no
            word.
        add_up: a number to its sum over the ranks that have other rows; backward gives each the whole gradient.
        collect: results for this rank's rows, ``.. m``, to those for all rows; backward keeps this rank's part of the gradient.
        meet: waits until the ranks that have other rows compute a loss of so many, too, where the head does not wait for them.
    """

    numbers: Tensor
    targets: Callable[[Tensor, int], Tensor]
    add_up: Callable[[Tensor], Tensor]
    collect: Callable[[Tensor], Tensor]
    meet: Callable[[int], None] = lambda rows: None

    def labels(self, numbers: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        """Return this rank's part of the targets ``m`` of some rows; the others do not count."""
        count = self.numbers.numel()
        if target.numel() != count:
            target = target.new_full((count,), ignore_index).scatter(0, numbers.reshape(-1), target)
        return self.targets(target, ignore_index)

    def around(self, inner: SplitRows) -> SplitRows:
        """Return how rows are split of which a rank's part is split again over others, as ``inner`` says."""
        return SplitRows(
            numbers=self.numbers,
            targets=lambda target, ignore_index: inner.targets(self.targets(target, ignore_index), ignore_index),
            add_up=lambda found: self.add_up(inner.add_up(found)),
            collect=lambda found: self.collect(inner.collect(found)),
            meet=self.meet,
        )

    def of_rows(self, numbers: Tensor, found: Tensor) -> Tensor:
        """Return the results for some rows, ``.. m``, from those for this rank's."""
        every = self.collect(found)
        return every if numbers.numel() == every.shape[-1] else every.index_select(-1, numbers.reshape(-1))


def target_weights(target: Tensor, ignore_index: int, class_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the factors of losses with targets ``m``: of the classes ``v``, or 1; 0 for a target that does not count."""
    counts = target != ignore_index
    if class_weights is None:
        return counts.to(dtype)
    return class_weights.to(dtype).index_select(0, target.masked_fill(~counts, 0)).masked_fill(~counts, 0.0)
