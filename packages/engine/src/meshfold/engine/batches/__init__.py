"""Batches: this data coordinate's part of a global batch, and how much its targets weigh."""

from __future__ import annotations

from meshfold.engine.batches.batch import Batch, prepare
from meshfold.engine.batches.cut import cut, share
from meshfold.engine.batches.gathered import gathered_list
from meshfold.engine.batches.own_loss import GivesWay
from meshfold.engine.batches.shares import Shares

__all__ = ["Batch", "GivesWay", "Shares", "cut", "gathered_list", "prepare", "share"]
