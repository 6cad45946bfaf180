"""What each data coordinate has of a global batch: whose targets weigh how much, and whose rows come first."""

from __future__ import annotations

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
        first_row: rows of the coordinates before.
        first_token: tokens of the coordinates before.
        rows: of the global batch.
    """

    def __init__(
        self, work: Batch, world: World, *, shifted: bool, places: bool, ignored: int = IGNORE_INDEX
    ) -> None:
        """Ask the other data coordinates; all must call.

        Args:
            work: this data coordinate's batch.
            world: where the coordinates lie.
            shifted, ignored: as for :meth:`Batch.count`.
            places: whether rows and tokens are wanted; to know them, the host waits for the device.
        """
        self.index = world.data_index
        self._work, self._world, self._shifted = work, world, shifted
        self.count_without(ignored)
        self._sharing = world.data_size // world.row_size
        self.first_row, self.first_token, self.rows = 0, 0, work.rows
        if places and world.row_size > 1:
            sizes: list[list[int]] = self._pending.wait()[:, 1:].tolist()
            before = sizes[: world.row_index]
            self.first_row, self.first_token = sum(rows for rows, _ in before), sum(n for _, n in before)
            self.rows = sum(rows for rows, _ in sizes)

    def count_without(self, ignored: int) -> None:
        """Count, without the targets that are ignored; all must call."""
        work, world = self._work, self._world
        self.count = work.count(shifted=self._shifted, ignored=ignored).to(world.device)
        sizes = [torch.full_like(self.count, size) for size in (work.rows, work.tokens)]
        self._pending = all_gather(
            torch.stack([self.count, *sizes]).view(1, 3), world.row_group, 0, async_op=True
        )

    def total(self) -> Tensor:
        """How many targets count in the global batch: a scalar int64."""
        return self._pending.wait()[:, 0].sum()

    def weight(self) -> Tensor:
        """This rank's share of them: a scalar float64."""
        return self.count.double() / (self.total().clamp(min=1) * self._sharing)
