"""Training: the engine, its models, checkpoints, data loader, and the command ``meshfold``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfold.engine.adapter import save_adapter
    from meshfold.engine.background_save import BackgroundSave
    from meshfold.engine.checkpoint import Checkpoint
    from meshfold.engine.compat.making import initialize
    from meshfold.engine.engine import Engine
    from meshfold.engine.errors import CheckpointError, TrainingError
    from meshfold.engine.from_folder import pretrained
    from meshfold.engine.loader import ShardedLoader
    from meshfold.engine.memory_plan import plan_memory
    from meshfold.engine.metrics import StepMetrics

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
    "BackgroundSave": "background_save",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "Engine": "engine",
    "ShardedLoader": "loader",
    "StepMetrics": "metrics",
    "TrainingError": "errors",
    "initialize": "compat.making",
    "plan_memory": "memory_plan",
    "pretrained": "from_folder",
    "save_adapter": "adapter",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: ``meshfold --help`` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
