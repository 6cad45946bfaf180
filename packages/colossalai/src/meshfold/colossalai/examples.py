"""Example inputs of a model for a pipeline, taken from a script's loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from meshfold.engine import ShardedLoader
from meshfold.engine.batches import prepare_batch
from meshfold.mesh import SpecError
from meshfold.mesh.spec import signature_mismatch

_ROWS = 2


def example_of(loader: Any, model: nn.Module, criterion: Callable[..., Any] | None) -> Any:
    """A small batch as a loader gives them, for ``Engine(..., example=...)``; None if none is needed, or to be had.

    None is needed by a model that is called with token ids. The batch is the first row of the dataset, twice, since values do
    not matter: the loader is not begun, and neither random numbers nor rows are used up. What can only be read once (an
    iterator, an ``IterableDataset``) is left alone.

    Args:
        loader: what the script has; None stays None.
        model: what a batch is for.
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
    with torch.random.fork_rng(devices=[]):  # of transforms, say
        example = collate([dataset[0]] * _ROWS)
    random.setstate(before)
    return example if _is_no_ids(example) and _fits(example, model, criterion) else None


def _is_no_ids(batch: Any) -> bool:
    """Tell whether a batch begins with something other than token ids."""
    if isinstance(batch, Mapping):
        return "input_ids" not in batch
    while isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    return isinstance(batch, Tensor) and batch.is_floating_point()


def _fits(batch: Any, model: nn.Module, criterion: Callable[..., Any] | None) -> bool:
    """Tell whether the model takes a batch as the loader gives it; a script may change batches before the call."""
    try:
        work = prepare_batch(batch, torch.device("cpu"), torch.float32, own_loss=criterion is not None)
    except SpecError:
        return False
    return signature_mismatch(model.forward, *work.args, **work.kwargs) is None
