"""Batches: the form that a model is called with, this data coordinate's part of a global batch, and the weight of its targets."""

from __future__ import annotations

from meshfold.engine.batches.batch import Batch, prepare_batch
from meshfold.engine.batches.branches import no_branches
from meshfold.engine.batches.loss import FallbackLoss
from meshfold.engine.batches.sharding import Shares, gather_list, randomness, row_range, shard_batch

__all__ = [
    "Batch",
    "FallbackLoss",
    "Shares",
    "gather_list",
    "no_branches",
    "prepare_batch",
    "randomness",
    "row_range",
    "shard_batch",
]
