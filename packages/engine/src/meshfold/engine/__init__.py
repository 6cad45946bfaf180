"""Training: the engine, its models, checkpoints, data loader, and the command ``meshfold``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfold.engine.batches.loader import ShardedLoader
    from meshfold.engine.checkpoints.background_save import BackgroundSave
    from meshfold.engine.checkpoints.checkpoint import Checkpoint
    from meshfold.engine.compat.making import initialize
    from meshfold.engine.engine import Engine
    from meshfold.engine.errors import CheckpointError, TrainingError
    from meshfold.engine.hugging_face.adapter import save_adapter
    from meshfold.engine.hugging_face.from_folder import pretrained
    from meshfold.engine.metrics import StepMetrics
    from meshfold.engine.planning.memory_plan import plan_memory

__all__ = [
    "BackgroundSave",
    "Checkpoint",
    "CheckpointError",
    "Engine",
    "ShardedLoader",
    "StepMetrics",
    "TrainingError",
    "initialize",
    "plan_memory",
    "pretrained",
    "save_adapter",
]

_HOMES = {
    "BackgroundSave": "checkpoints.background_save",
    "Checkpoint": "checkpoints.checkpoint",
    "CheckpointError": "errors",
    "Engine": "engine",
    "ShardedLoader": "batches.loader",
    "StepMetrics": "metrics",
    "TrainingError": "errors",
    "initialize": "compat.making",
    "plan_memory": "planning.memory_plan",
    "pretrained": "hugging_face.from_folder",
    "save_adapter": "hugging_face.adapter",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: ``meshfold --help`` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
