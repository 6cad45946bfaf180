"""Sharding of a global batch: each data coordinate's rows, the weight of its targets, and the random numbers of its dropout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from meshfold.engine.batches.batch import Batch
from meshfold.engine.world import World
from meshfold.mesh import SpecError, all_gather
from meshfold.mesh.model_io import IGNORE_INDEX, LossMean, targets_key
from meshfold.mesh.random import dropout_stream, key_of

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def shard_batch(batch: Any, index: int, blocks: int) -> Any:
    """Return the rows of a global batch that belong to one of ``blocks`` data coordinates, in the same form.

    Rows are divided in order and as evenly as possible: the first ``rows % blocks`` coordinates get one more. A coordinate
    without rows gets one that does not count: its labels are all -100.

    Raises:
        SpecError: if there are too few rows and no labels to mark one that does not count, or tensors of the
            batch disagree about the rows.
    """
    if isinstance(batch, Tensor) and not batch.dim():
        raise SpecError("a batch without dims cannot be split: give a tensor whose first dim is the batch")
    if isinstance(batch, Tensor):
        _check_rows(batch.shape[0], blocks, batch)
        mine = _cut_tensor(batch, index, blocks)
        return {"input_ids": batch[:1], "labels": torch.full_like(batch[:1], IGNORE_INDEX)} if mine is None else mine
    if isinstance(batch, Mapping):
        sizes = {name: value.shape[0] for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        rows = max(sizes.values(), default=0)
        if any(size not in (rows, 1) for size in sizes.values()):
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise SpecError(
                f"tensors of a batch have different numbers of rows ({listed}): give all of them as many, or one. If one holds all "
                "samples' rows joined, such as the patches of their images (Qwen2-VL), no part of it belongs to a rank: give each "
                "data rank a batch of its own (a DistributedSampler's) in place of engine.shard_batch(batch)"
            )
        fields = {
            name: _cut_tensor(value, index, blocks) if sizes.get(name) == rows and rows else value
            for name, value in batch.items()
        }
        named = targets_key(batch) or "labels"
        labels = batch.get(named, batch.get("input_ids"))
        _check_rows(rows, blocks, labels)
        if len(row_range(rows, index, blocks)) or not isinstance(labels, Tensor):
            return fields
        filler = {name: value[:1] if name in sizes else value for name, value in batch.items()}
        return {**filler, named: torch.full_like(labels[:1], IGNORE_INDEX)}
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
        if isinstance(targets, Tensor) and isinstance(inputs, Tensor):
            if inputs.shape[0] != targets.shape[0]:
                raise SpecError(
                    f"{inputs.shape[0]} rows of inputs, but {targets.shape[0]} rows of targets: give each input its target"
                )
            _check_rows(inputs.shape[0], blocks, targets)
            first, second = _cut_tensor(inputs, index, blocks), _cut_tensor(targets, index, blocks)
            if first is not None and second is not None:
                return first, second
            return inputs[:1], torch.full_like(targets[:1], IGNORE_INDEX)
        if isinstance(targets, Tensor) and isinstance(inputs, tuple | list) and inputs:
            each = [shard_batch((one, targets), index, blocks) for one in inputs]  # checks each input
            return tuple(one for one, _ in each), each[0][1]
    raise SpecError(
        f"a batch of type {type(batch).__name__} cannot be split: give a tensor, a dict of tensors, or a pair "
        "(inputs, targets) of tensors; inputs may be a tuple"
    )


def row_range(rows: int, index: int, blocks: int) -> range:
    """Return the range of rows that belongs to a data coordinate."""
    each, more = divmod(rows, blocks)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))


def _cut_tensor(value: Tensor, index: int, blocks: int) -> Tensor | None:
    """Return a rank's rows; None if it gets none."""
    mine = row_range(value.shape[0], index, blocks)
    return value[mine.start : mine.stop] if len(mine) else None


def _check_rows(rows: int, blocks: int, labels: Any) -> None:
    """Refuse, on every rank, a batch that leaves a data rank without rows and has no labels to mark a filler row as ignored."""
    if rows >= blocks or (rows and isinstance(labels, Tensor) and labels.dtype in _INTEGERS):
        return
    raise SpecError(
        f"a global batch of {rows} rows for {blocks} data ranks, without integer labels to mark a filler row as ignored: "
        f"give at least {blocks} rows"
    )


class Shares:
    """This data coordinate's part of the global batch, which is the batches of all coordinates in order.

    Ranks that have different tokens of the same rows get the same batch. It counts once, and each of these ranks has a part of
    its weight.

    Attributes:
        index: this rank's index among those that hold different parts of the batch, rows or tokens.
        count: its targets that count, a scalar int64 on the device.
        part: this data coordinate's number.
    """

    def __init__(self, work: Batch, world: World, *, mean: LossMean, places: bool, ignored: int = IGNORE_INDEX) -> None:
        """Ask the other data coordinates; all must call.

        Args:
            work: this data coordinate's batch.
            world: where the coordinates lie.
            mean, ignored: as for :meth:`Batch.count`.
            places: whether row numbers are needed, as by dropout; reading them waits for the device.
        """
        self.index = world.data_index
        self._work, self._world = work, world
        self.recount(mean, ignored)
        self._sharing = world.data_size // world.row_size
        self.part = world.row_index
        self._located = places and world.row_size > 1

    @cached_property
    def _sizes(self) -> list[list[int]]:
        """Return rows and tokens of each data rank; waits for the device."""
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

    def recount(self, mean: LossMean, ignored: int) -> None:
        """Count the targets of a loss that is this mean, without those that are ignored; all must call."""
        work, world, self._mean = self._work, self._world, mean
        self.count = work.count(mean, device=world.device, ignored=ignored)
        sizes = [torch.full_like(self.count, size) for size in (work.rows, work.tokens)]
        self._pending = all_gather(torch.stack([self.count, *sizes]).view(1, 3), world.row_group, 0, async_op=True)

    def total(self) -> Tensor:
        """Return how many targets count in the global batch: a scalar int64."""
        return self._pending.wait()[:, 0].sum()

    def weight(self) -> Tensor:
        """Return this rank's share of them: a scalar float64. Of a sum over rows each rank has its own."""
        if self._mean is LossMean.SUM:
            return (self.count > 0).double() / self._sharing
        return self.count.double() / (self.total().clamp(min=1) * self._sharing)


def gather_list(value: Tensor, world: World) -> list[Tensor]:
    """Return every data coordinate's tensor in order, whose sizes may differ; all must call."""
    over = world.row_group
    if over.size == 1:
        return [value]
    shape = torch.tensor(value.shape, dtype=torch.int64, device=world.device)
    shapes = all_gather(shape.view(1, -1), over, 0)
    most = shapes.max(0).values.tolist()
    padded = torch.zeros(most, dtype=value.dtype, device=world.device)
    padded[tuple(slice(size) for size in value.shape)] = value.detach().to(world.device)
    found = all_gather(padded.unsqueeze(0), over, 0)
    return [one[tuple(slice(size) for size in sizes)] for one, sizes in zip(found, shapes.tolist(), strict=True)]


@contextmanager
def randomness(seed: int, step: int, shares: Shares, device: torch.device, *, torch_too: bool) -> Iterator[None]:
    """Context manager: dropout of one micro-step, as a function of seed, step and position in the global batch.

    Args:
        seed: of the run.
        step: micro-step, counted over the whole run.
        shares: position of this data coordinate's rows in the global batch, which determines what they drop.
        device: of torch's generator.
        torch_too: also seed torch's generators inside, for dropout that draws from them. It then depends on the number
            of data coordinates, but is repeatable.
    """
    with dropout_stream(seed, step, batch=shares):
        if not torch_too:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(key_of(f"dropout/{seed}/{step}/{shares.index}"))
            yield
