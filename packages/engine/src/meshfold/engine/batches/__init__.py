"""Batches: the form a model is called with, this data coordinate's part of a global batch, and how much its targets weigh."""

from __future__ import annotations

from meshfold.engine.batches.batch import Batch, prepare_batch
from meshfold.engine.batches.cut import row_range, shard_batch
from meshfold.engine.batches.gathered import gather_list
from meshfold.engine.batches.own_loss import FallbackLoss
from meshfold.engine.batches.shares import Shares

__all__ = ["Batch", "FallbackLoss", "Shares", "gather_list", "prepare_batch", "row_range", "shard_batch"]
