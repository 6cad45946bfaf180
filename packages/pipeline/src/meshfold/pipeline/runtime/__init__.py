"""Runs a program: a model in stages, its micro-batches, and what travels between ranks."""

from __future__ import annotations

from meshfold.pipeline.runtime.microbatch import Microbatch, Replicas
from meshfold.pipeline.runtime.stage import Stage

__all__ = ["Microbatch", "Replicas", "Stage"]
