"""Loaders of which ``batch_size`` counts the rows of one data coordinate, as in Colossal-AI."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from meshfold.colossalai.context import gpc
from meshfold.colossalai.loaders import check_rows
from meshfold.engine import ShardedLoader
from meshfold.mesh import SpecError


class _Epochs:
    """``loader.sampler`` of scripts that say the epoch: ``loader.sampler.set_epoch(epoch)``."""

    def __init__(self, loader: ShardedLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """The order that comes next; it is that of the next epoch anyway."""
        if epoch != self._loader.epoch:
            self._loader.epoch, self._loader.served = epoch, 0


class PreparedLoader(ShardedLoader, DataLoader[Any]):  # type: ignore[misc]  # the first one has its own
    """A loader of the engine's that is one of torch's to ``isinstance``; ``DataLoader.__init__`` has no part in it."""

    @property
    def sampler(self) -> _Epochs:  # type: ignore[override]
        """Can be told the epoch."""
        return _Epochs(self)


def shared_loader(
    dataset: Any, batch_size: int, *, index: int, blocks: int, name: str = "train", **options: Any
) -> ShardedLoader:
    """Global batches of ``batch_size`` rows for each of so many data coordinates.

    Args:
        dataset: has a length and gives an example for a number.
        batch_size: rows of one coordinate.
        index: this rank's coordinate.
        blocks: how many there are.
        name: for messages.
        options: of :class:`meshfold.engine.ShardedLoader`.

    Raises:
        SpecError: for a batch size that is no whole number, and a last batch with fewer rows than coordinates.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise SpecError(f"batch_size={batch_size!r}: a whole number from 1 up")
    rows = batch_size * blocks
    if hasattr(dataset, "__len__"):
        check_rows(name, len(dataset), rows, blocks, drop_last=bool(options.get("drop_last")))
    return PreparedLoader(dataset, batch_size=rows, index=index, blocks=blocks, **options)


def get_dataloader(
    dataset: Any,
    add_sampler: bool = True,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    *,
    batch_size: int = 1,
    **options: Any,
) -> ShardedLoader:
    """This rank's rows of a dataset, on the mesh of the last ``launch``; ``batch_size`` counts those of a data coordinate.

    Args:
        dataset: has a length and gives an example for a number.
        add_sampler: True; without one every rank would have all rows.
        shuffle: a new order each epoch.
        seed: of the orders.
        drop_last: leave out a last batch that is smaller.
        pin_memory: see torch.utils.data.DataLoader.
        num_workers: likewise.
        batch_size: rows of a data coordinate's batch.
        options: of torch.utils.data.DataLoader.

    Raises:
        SpecError: before a ``launch``, and for what does not fit.
    """
    if not add_sampler:
        raise SpecError("get_dataloader(add_sampler=False): every rank would have all rows: leave it out")
    return shared_loader(
        dataset,
        batch_size,
        index=gpc.mesh.index("data"),
        blocks=gpc.mesh.size("data"),
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        **options,
    )
