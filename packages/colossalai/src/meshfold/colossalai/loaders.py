"""Data loaders: a script's own, split over the data coordinates, and loaders from ``get_dataloader``; example inputs of a
batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from meshfold.colossalai.context import gpc
from meshfold.engine import Engine, ShardedLoader
from meshfold.engine.batches import prepare_batch
from meshfold.mesh import SpecError
from meshfold.mesh.spec import signature_mismatch

_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class ShardedBatches:
    """Loader of this data coordinate's rows of batches from an iterable that is the same on every rank."""

    def __init__(self, batches: Iterable[Any], shard_batch: Callable[[Any], Any]) -> None:
        """Args:
        batches: global ones, the same on every rank.
        shard_batch: the engine's.
        """
        self.batches, self._shard_batch = batches, shard_batch

    def __iter__(self) -> Iterator[Any]:
        return map(self._shard_batch, self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


def shard_loader(loader: Any, engine: Engine, name: str) -> Any:
    """Return a script's loader, reduced to each data coordinate's rows.

    The batches of a plain loader are global ones, as in the script of one process. It is made again, so that each rank
    reads only its own rows, shuffles like the others, and resumes where a checkpoint stopped. A loader with a distributed
    sampler is already sharded, and is kept if this matches the spec. So are the engine's own loaders and those of
    :func:`get_dataloader`. Batches of any other iterable are cut, and must be the same on every rank.

    Args:
        loader: the script's; None stays None.
        engine: its spec says which rows a rank reads.
        name: under which checkpoints keep its position.

    Raises:
        SpecError: for a sampler that shards for other ranks, and a last batch with fewer rows than there are coordinates.
    """
    if loader is None:
        return None
    if isinstance(loader, ShardedLoader) and name not in engine.data_positions:
        engine.data_positions.follow(name, loader)
    if isinstance(loader, ShardedLoader | ShardedBatches):
        return loader
    if not isinstance(loader, DataLoader):
        if not isinstance(loader, Iterable):
            raise SpecError(f"{name} loader {loader!r}: give a DataLoader, or something that gives batches")
        return ShardedBatches(loader, engine.shard_batch)
    sampler, world = loader.sampler, engine.world
    replicas = getattr(sampler, "num_replicas", None)
    if replicas is not None:
        rank = getattr(sampler, "rank", None)
        if (replicas, rank) != (world.row_size, world.row_index):
            raise SpecError(
                f"the {name} loader's sampler is for {replicas} ranks, of which this is number {rank}, and under "
                f"{dict(engine.spec.axes)} there are {world.row_size} data coordinates, of which this is number {world.row_index}: "
                "give the DataLoader without a sampler, and batch_size times the data coordinates"
            )
        return loader
    plain = type(sampler) is SequentialSampler or _shuffles(sampler)
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset) or not plain:
        return ShardedBatches(loader, engine.shard_batch)
    options = {option: getattr(loader, option) for option in _OPTIONS}
    check_rows(name, len(loader.dataset), loader.batch_size, world.row_size, drop_last=loader.drop_last)  # type: ignore[arg-type]
    return engine.dataloader(
        loader.dataset,
        loader.batch_size,
        shuffle=type(sampler) is RandomSampler,
        name=name,
        drop_last=loader.drop_last,
        **options,
    )


def check_rows(name: str, rows: int, batch: int, coordinates: int, *, drop_last: bool) -> None:
    """Check that every data coordinate gets a row of every batch, since a mean over no rows is NaN.

    Raises:
        SpecError: if one does not.
    """
    last = rows % batch if not drop_last else 0
    least = min(batch, last or batch)
    if least < coordinates:
        where = "the last batch" if least == last else "a batch"
        raise SpecError(
            f"{where} of the {name} loader has {least} row{'' if least == 1 else 's'} for {coordinates} data coordinates: "
            + ("write drop_last=True" if least == last and batch >= coordinates else "use a larger batch_size")
        )


def _shuffles(sampler: Any) -> bool:
    """Return True for the sampler that ``shuffle=True`` makes."""
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


_ROWS = 2


def example_of(loader: Any, model: nn.Module, criterion: Callable[..., Any] | None) -> Any:
    """Return a small batch of a loader for ``Engine(..., example=...)``; None if none is needed or available.

    A model that is called with token ids needs none. The batch is the first row of the dataset, twice, since values do
    not matter: the loader is not started, and no random numbers or rows are consumed. A source that can only be read once
    (an iterator, an ``IterableDataset``) is not touched.

    Args:
        loader: the script's; None stays None.
        model: that the batch is for.
        criterion: the script's loss function, if there is one.
    """
    if isinstance(loader, ShardedLoader):
        dataset, collate = loader.dataset, loader.collate
    elif isinstance(loader, DataLoader) and loader.batch_size is not None:
        dataset, collate = loader.dataset, loader.collate_fn
    else:
        return None
    if isinstance(dataset, IterableDataset) or not len(dataset):
        return None
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):  # transforms may draw random numbers
        example = collate([dataset[0]] * _ROWS)
    random.setstate(before)
    return example if _is_no_ids(example) and _fits(example, model, criterion) else None


def _is_no_ids(batch: Any) -> bool:
    """Return True if a batch begins with something other than token ids."""
    if isinstance(batch, Mapping):
        return "input_ids" not in batch
    while isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    return isinstance(batch, Tensor) and batch.is_floating_point()


def _fits(batch: Any, model: nn.Module, criterion: Callable[..., Any] | None) -> bool:
    """Return True if the model accepts the loader's batches unchanged; a script may change them before the call."""
    try:
        work = prepare_batch(batch, torch.device("cpu"), torch.float32, own_loss=criterion is not None)
    except SpecError:
        return False
    return signature_mismatch(model.forward, *work.args, **work.kwargs) is None


class _Epochs:
    """``loader.sampler`` for scripts that call ``loader.sampler.set_epoch(epoch)``."""

    def __init__(self, loader: ShardedLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader already changes the order every epoch."""
        if epoch != self._loader.epoch:
            self._loader.epoch, self._loader.served = epoch, 0


class PreparedLoader(ShardedLoader, DataLoader[Any]):  # type: ignore[misc]  # the first one has its own
    """The engine's loader as an instance of torch's; ``DataLoader.__init__`` is not called."""

    @property
    def sampler(self) -> _Epochs:  # type: ignore[override]
        """A sampler with ``set_epoch``."""
        return _Epochs(self)


def shared_loader(
    dataset: Any, batch_size: int, *, index: int, blocks: int, name: str = "train", **options: Any
) -> ShardedLoader:
    """Return a loader of global batches with ``batch_size`` rows for each data coordinate.

    Args:
        dataset: map-style: it has a length, and an example for each index.
        batch_size: rows of one coordinate.
        index: this rank's coordinate.
        blocks: how many there are.
        name: for messages.
        options: of :class:`meshfold.engine.ShardedLoader`.

    Raises:
        SpecError: for a batch size that is not a whole number, and a last batch with fewer rows than coordinates.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise SpecError(f"batch_size={batch_size!r}: give a whole number from 1 up")
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
    """Return a loader of this rank's rows, on the mesh of the last ``launch``; ``batch_size`` is per data coordinate.

    Args:
        dataset: map-style: it has a length, and an example for each index.
        add_sampler: must be True; without a sampler every rank would have all rows.
        shuffle: a new order each epoch.
        seed: of the orders.
        drop_last: leave out a smaller last batch.
        pin_memory: see torch.utils.data.DataLoader.
        num_workers: as in DataLoader.
        batch_size: rows of a data coordinate's batch.
        options: of torch.utils.data.DataLoader.

    Raises:
        SpecError: before a ``launch``, and for invalid arguments.
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
