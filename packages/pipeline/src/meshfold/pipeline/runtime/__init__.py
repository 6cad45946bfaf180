"""Execution of a program: stages of a model, micro-batches, and messages between ranks."""

from __future__ import annotations

from meshfold.pipeline.runtime.blocks import balance_blocks
from meshfold.pipeline.runtime.microbatch import Microbatch, Replicas
from meshfold.pipeline.runtime.stage import Stage

__all__ = ["Microbatch", "Replicas", "Stage", "balance_blocks"]
