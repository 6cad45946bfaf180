"""Each data coordinate's part of a global batch: the weight of its targets, and the order of the rows."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from meshfold.engine.batches.batch import Batch
from meshfold.engine.world.world import World
from meshfold.mesh import all_gather
from meshfold.mesh.model_io import IGNORE_INDEX


class Shares:
    """This data coordinate's part of the global batch, which is the batches of all coordinates in order.

    Ranks that have different tokens of the same rows are given the same batch: it counts once, and weighs for each of
    them its part of what it does for a rank that has it alone.

    Attributes:
        index: this rank's place among those that hold different parts of the batch, rows or tokens.
        count: its targets that count, a scalar int64 on the device.
        part: this data coordinate's number.
    """

    def __init__(
        self, work: Batch, world: World, *, shifted: bool, places: bool, ignored: int = IGNORE_INDEX
    ) -> None:
        """Ask the other data coordinates; all must call.

        Args:
            work: this data coordinate's batch.
            world: where the coordinates lie.
            shifted, ignored: as for :meth:`Batch.count`.
            places: whether the numbers of the rows are wanted, as dropout does; when it asks, the host waits for the device.
        """
        self.index = world.data_index
        self._work, self._world, self._shifted = work, world, shifted
        self.count_without(ignored)
        self._sharing = world.data_size // world.row_size
        self.part = world.row_index
        self._located = places and world.row_size > 1

    @cached_property
    def _sizes(self) -> list[list[int]]:
        """Rows and tokens of each data coordinate; the host waits for the device."""
        if not self._located:
            return [[0, 0]] * self._world.row_index + [[self._work.rows, self._work.tokens]]
        sizes: list[list[int]] = self._pending.wait()[:, 1:].tolist()
        return sizes

    @cached_property
    def first_row(self) -> int:
        """Rows of the coordinates before."""
        return sum(rows for rows, _ in self._sizes[: self.part])

    @cached_property
    def first_token(self) -> int:
        """Tokens of the coordinates before."""
        return sum(tokens for _, tokens in self._sizes[: self.part])

    @cached_property
    def rows(self) -> int:
        """Rows of the global batch."""
        return sum(rows for rows, _ in self._sizes)

    def count_without(self, ignored: int) -> None:
        """Count, without the targets that are ignored; all must call."""
        work, world = self._work, self._world
        self.count = work.count(shifted=self._shifted, device=world.device, ignored=ignored)
        sizes = [torch.full_like(self.count, size) for size in (work.rows, work.tokens)]
        self._pending = all_gather(
            torch.stack([self.count, *sizes]).view(1, 3), world.row_group, 0, async_op=True
        )

    def total(self) -> Tensor:
        """Return how many targets count in the global batch: a scalar int64."""
        return self._pending.wait()[:, 0].sum()

    def weight(self) -> Tensor:
        """This rank's share of them: a scalar float64."""
        return self.count.double() / (self.total().clamp(min=1) * self._sharing)
