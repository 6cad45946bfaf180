"""Sharding of a global batch: the rows of each data coordinate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX, targets_key

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def shard_batch(batch: Any, index: int, blocks: int) -> Any:
    """The rows of a global batch that belong to one of ``blocks`` data coordinates, in the same form.

    Rows are dealt in order and as evenly as possible: the first ``rows % blocks`` coordinates get one more. One that
    gets none has a row that does not count: its labels are all -100.

    Raises:
        SpecError: if rows are too few and there are no labels to say that one does not count, or tensors of the
            batch disagree about the rows.
    """
    if isinstance(batch, Tensor) and not batch.dim():
        raise SpecError("a batch of one number cannot be cut: the first dim of a tensor is its rows")
    if isinstance(batch, Tensor):
        _check_rows(batch.shape[0], blocks, batch)
        mine = _cut_tensor(batch, index, blocks)
        return (
            {"input_ids": batch[:1], "labels": torch.full_like(batch[:1], IGNORE_INDEX)}
            if mine is None
            else mine
        )
    if isinstance(batch, Mapping):
        sizes = {
            name: value.shape[0] for name, value in batch.items() if isinstance(value, Tensor) and value.dim()
        }
        rows = max(sizes.values(), default=0)
        for name, size in sizes.items():
            if size not in (rows, 1):
                raise SpecError(
                    f"{name!r} has {size} rows in a batch of {rows}: every tensor of a batch has them all, or one"
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
                raise SpecError(f"{inputs.shape[0]} rows of inputs for {targets.shape[0]} rows of targets")
            _check_rows(inputs.shape[0], blocks, targets)
            first, second = _cut_tensor(inputs, index, blocks), _cut_tensor(targets, index, blocks)
            if first is not None and second is not None:
                return first, second
            return inputs[:1], torch.full_like(targets[:1], IGNORE_INDEX)
        if isinstance(targets, Tensor) and isinstance(inputs, tuple | list) and inputs:
            each = [
                shard_batch((one, targets), index, blocks) for one in inputs
            ]  # says what is wrong with one
            return tuple(one for one, _ in each), each[0][1]
    raise SpecError(
        f"a batch of type {type(batch).__name__} cannot be cut: give a tensor, a dict of tensors, or a pair "
        "(inputs, targets) of tensors, of which inputs may be a tuple"
    )


def row_range(rows: int, index: int, blocks: int) -> range:
    """Return the rows, of so many, that belong to a data coordinate."""
    each, more = divmod(rows, blocks)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))


def _cut_tensor(value: Tensor, index: int, blocks: int) -> Tensor | None:
    """Its rows; None if it gets none."""
    mine = row_range(value.shape[0], index, blocks)
    return value[mine.start : mine.stop] if len(mine) else None


def _check_rows(rows: int, blocks: int, labels: Any) -> None:
    """Refuse, on every rank, a batch in which some coordinate has no row and nothing can say that one does not count."""
    if rows >= blocks or (rows and isinstance(labels, Tensor) and labels.dtype in _INTEGERS):
        return
    raise SpecError(
        f"a global batch of {rows} rows for {blocks} data coordinates, and no integer labels that could say that a row "
        f"does not count: give at least {blocks} rows"
    )
