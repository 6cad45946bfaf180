"""Training: the engine, its models, checkpoints and data loader."""

from __future__ import annotations

from meshfold.engine.engine import Engine
from meshfold.engine.errors import CheckpointError, TrainingError
from meshfold.engine.loader import ShardedLoader
from meshfold.engine.metrics import StepMetrics

__all__ = ["CheckpointError", "Engine", "ShardedLoader", "StepMetrics", "TrainingError"]
