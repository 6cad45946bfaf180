"""Loading of each data coordinate's rows of global batches, in an order that does not depend on the mesh."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from meshfold.engine.batches.sharding import row_range, shard_batch
from meshfold.mesh import SpecError
from meshfold.mesh.random import key_of
from meshfold.mesh.spec import argument_checks as settings

# Arguments of torch's loader that the engine's loader has itself, or sets itself.
_OURS = ("dataset", "batch_size", "shuffle", "drop_last", "sampler", "batch_sampler")


class ShardedLoader:
    """Loader with one epoch of batches per iteration, which resumes where a checkpoint stopped.

    The rows of global batch n are the same under every spec; only their distribution differs. So a position (epoch,
    batches served) also means the same under every spec.

    A loop that ends by ``break`` ends its epoch. The next loop is the next epoch, in another order if rows are shuffled, so
    short epochs do not always see the same rows. ``next(iter(loader))`` costs no more than an order. Until then the position
    stays at the ``break``: a checkpoint of it resumes in the middle.

    Attributes:
        epoch: the current one, from 0.
        served: global batches of it that were served: the index of the next one.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        index: int,
        blocks: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        """Args:
            dataset: map-style: it has a length, and an example for each index.
            batch_size: rows of a *global* batch: those of one micro-step over all data coordinates.
            index: this rank's data coordinate.
            blocks: how many there are.
            shuffle: a new order each epoch.
            seed: of the orders.
            drop_last: leave out a smaller last batch.
            options: of torch.utils.data.DataLoader: num_workers, collate_fn, pin_memory, ...

        Raises:
            SpecError: for a dataset without a length or of length 0, a batch size that is not a whole number, or options that
                torch's loader does not take.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise SpecError(
                f"dataset {type(dataset).__name__} must have a length and give an example for a number: dataset[i]"
            )
        for taken in ("batch_sampler", "sampler"):
            if taken in options:
                raise SpecError(
                    f"dataloader(..., {taken}=...): the engine decides which rank gets which rows; leave it out"
                )
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool):
                raise SpecError(f"dataloader(..., {name}={value!r}): True or False")
        self.batch_size = settings.count("batch_size", batch_size)
        self.dataset, self.shuffle, self.seed, self.drop_last = dataset, shuffle, seed, drop_last
        self._index, self._blocks, self._options = index, blocks, options
        self.epoch = 0
        self.served = 0
        self._current: object = None  # the iterator that advances the position
        self._loaded = False  # the position comes from a checkpoint
        if not self._rows:
            raise SpecError("a dataset of 0 examples gives no batch: len(dataset) is 0")
        if len(self) == 0:
            raise SpecError(
                f"a dataset of {self._rows} examples gives no batch of {batch_size}: use a smaller batch_size, or "
                "drop_last=False"
            )
        known = {name: None for name in inspect.signature(DataLoader).parameters if name not in _OURS}
        settings.known_keys("dataloader", options, options, known)
        try:
            self._serve(_Batches(self, start=0))  # torch checks the options here
        except (TypeError, ValueError) as error:
            raise SpecError(f"dataloader(..., {options}): {error}") from error

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return self._rows // self.batch_size if self.drop_last else -(-self._rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        # The last loop was left early, or took the last batch without asking for another.
        if self.served and not self._loaded:
            self.epoch, self.served = self.epoch + 1, 0
        self._loaded = False
        mine = self._current = object()
        batches = _Batches(self, start=self.served)
        for number, batch in enumerate(self._serve(batches), self.served):
            if self._current is mine:  # unless a later loop or a loaded position replaced it
                self.served = number + 1
            # A data rank without rows gets a row that does not count, as the second of two ranks that share one row.
            yield batch if batches.mine(number) else shard_batch(batch, 1, 2)
        if self._current is mine:
            self.epoch, self.served = self.epoch + 1, 0

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Makes a batch of rows."""
        return self._options.get("collate_fn") or default_collate

    def _serve(self, batches: _Batches) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_sampler=batches, **self._options)

    def state_dict(self) -> dict[str, int]:
        """Return the position, epoch and batches served, with a description of the data."""
        return {"epoch": self.epoch, "served": self.served, **self._order()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a position: the next iteration serves the rest of that epoch, in its order.

        Raises:
            SpecError: within an epoch, for another dataset, or batches that do not start at the position: rows would be
                skipped or repeated.
        """
        self.seed, self.epoch, self.served = self.position(state)
        self._current, self._loaded = None, True

    def position(self, state: Mapping[str, int]) -> tuple[int, int, int]:
        """Return seed, epoch and batches served of a saved position; raise what :meth:`load_state_dict` does, change nothing."""
        epoch, served = int(state["epoch"]), int(state["served"])
        own = {**self._order(), "seed": int(state.get("seed", self.seed))}
        was = {name: int(state.get(name, value)) for name, value in own.items()}
        done = served * was["batch_size"]
        if (was["batch_size"] == own["batch_size"] and served >= len(self)) or done >= was["examples"]:
            epoch, served = epoch + 1, 0
        elif served and was != own:
            if {**was, "batch_size": 0} != {**own, "batch_size": 0} or done % self.batch_size:
                raise SpecError(
                    f"the loader's position is {done} examples into an epoch of {_told(was)}, and this is one of {_told(own)}: "
                    "examples would be skipped or repeated. Continue with the same loader or a batch_size that divides "
                    f"{done}, or save at the end of an epoch"
                )
            served = done // self.batch_size
        return own["seed"], epoch, served

    def share_of(self, rows: int) -> range:
        """Return the rows of a global batch that this data coordinate gets."""
        return row_range(rows, self._index, self._blocks)

    @property
    def _rows(self) -> int:
        return len(self.dataset)

    def _order(self) -> dict[str, int]:
        """Return everything that determines the order of an epoch's batches."""
        return {"batch_size": self.batch_size, "examples": self._rows, "shuffle": int(self.shuffle), "seed": self.seed}


def _told(order: dict[str, int]) -> str:
    shuffled = "shuffled" if order["shuffle"] else "in order"
    return f"{order['examples']} examples, {shuffled}, in batches of {order['batch_size']}"


class _Batches:
    """This data rank's examples, batch by batch, in the epoch's order."""

    def __init__(self, loader: ShardedLoader, start: int) -> None:
        self._loader, self._start = loader, start
        self._order = torch.arange(loader._rows)
        if loader.shuffle:
            generator = torch.Generator().manual_seed(key_of(f"order/{loader.seed}/{loader.epoch}"))
            self._order = torch.randperm(loader._rows, generator=generator)

    def mine(self, number: int) -> list[int]:
        """Return this data rank's examples of a batch; none if there are fewer rows than ranks."""
        rows = self._rows(number)
        mine = self._loader.share_of(len(rows))
        return rows[mine.start : mine.stop].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self._start, len(self._loader)):
            yield self.mine(number) or self._rows(number)[:1].tolist()

    def _rows(self, number: int) -> Tensor:
        size = self._loader.batch_size
        return self._order[number * size : (number + 1) * size]


class DataPositions:
    """Loaders by name; the position of a loader that does not exist yet is kept for it, and saved again until then."""

    def __init__(self) -> None:
        self._loaders: dict[str, ShardedLoader] = {}
        self._waiting: dict[str, dict[str, int]] = {}

    def follow(self, name: str, loader: ShardedLoader) -> ShardedLoader:
        """Include this loader's position in later checkpoints, resume it where a loaded one stopped, and return it."""
        self._loaders[name] = loader
        if name in self._waiting:
            loader.load_state_dict(self._waiting.pop(name))
        return loader

    def __contains__(self, name: object) -> bool:
        return name in self._loaders

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return the position of each, by name."""
        return {**self._waiting, **{name: loader.state_dict() for name, loader in self._loaders.items()}}

    def check(self, state: Mapping[str, dict[str, int]]) -> None:
        """Raise what :meth:`load_state_dict` would, and change nothing."""
        for name, loader in self._loaders.items():
            if name in state:
                loader.position(state[name])

    def load_state_dict(self, state: Mapping[str, dict[str, int]]) -> None:
        """Set existing loaders to their positions; the other positions wait."""
        self._waiting = dict(state)
        for name, loader in self._loaders.items():
            if name in self._waiting:
                loader.load_state_dict(self._waiting.pop(name))
