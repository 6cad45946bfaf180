"""The rows that EngineTrainer trains on: each once per epoch; a smaller last batch is divided over data coordinates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from meshfold.engine.batches import row_range, shard_batch


class RowsOfBatches(Sampler[list[int]]):
    """This data coordinate's rows of global batches; if it has none, another's as ``~row``, which does not count."""

    def __init__(
        self, length: int, rows: int, index: int, blocks: int, seed: int, *, shuffle: bool, drop_last: bool
    ) -> None:
        """Args:
        length: of the dataset.
        rows: of a data coordinate's batch.
        index: this rank's data coordinate, of ``blocks``.
        blocks: how many there are.
        seed: of the order, another one each epoch; without ``shuffle`` it is the dataset's.
        shuffle: whether there is another order.
        drop_last: leave out a last batch that is smaller.
        """
        self._length, self._batch, self._index, self._blocks = length, rows * blocks, index, blocks
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self.epoch = 0

    def __len__(self) -> int:
        return self._length // self._batch if self._drop_last else -(-self._length // self._batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._length, generator=generator)
        for number in range(len(self)):
            rows = order[number * self._batch : (number + 1) * self._batch].tolist()
            mine = row_range(len(rows), self._index, self._blocks)
            yield rows[mine.start : mine.stop] or [~rows[0]]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, before it begins; the Trainer asks the sampler itself if it resumes inside an epoch."""
        self.epoch = epoch


class Rows(Dataset[Any]):
    """A dataset whose row ``~i`` is row ``i``, and does not count."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        return Uncounted(self._dataset[~number]) if number < 0 else self._dataset[number]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """Return the rows of a batch at once, where the dataset supports it."""
        if numbers[0] < 0 or not hasattr(self._dataset, "__getitems__"):
            return [self[number] for number in numbers]
        rows: list[Any] = self._dataset.__getitems__(numbers)
        return rows


class Uncounted:
    """A row that does not count, for a data coordinate without rows of the batch."""

    def __init__(self, row: Any) -> None:
        self.row = row


class Collated:
    """Makes a batch of rows of :class:`Rows`."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        if isinstance(rows[0], Uncounted):
            # If two ranks share one row, the second gets a row that does not count.
            return shard_batch(self._collate([rows[0].row]), 1, 2)
        return self._collate(rows)


class Loader(DataLoader[Any]):
    """Loader with ``set_epoch``, as the Trainer expects of accelerate's."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, before it begins."""
        assert isinstance(self.batch_sampler, RowsOfBatches)
        self.batch_sampler.set_epoch(epoch)
