"""The train step on any mesh of devices: :class:`Engine`, its batches and its checkpoints."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshfold.engine import moved
from meshfold.engine.moved import integration

if TYPE_CHECKING:
    from meshfold.checkpoint import CheckpointError
    from meshfold.engine.averages import averaged_state_dict, averaged_weights
    from meshfold.engine.batches.loader import ShardedLoader
    from meshfold.engine.checkpoints.checkpoint import Checkpoint
    from meshfold.engine.checkpoints.saving import BackgroundSave
    from meshfold.engine.engine import Engine
    from meshfold.engine.errors import TrainingError
    from meshfold.engine.precision_names import precision_name
    from meshfold.engine.step_metrics import StepMetrics
    from meshfold.engine.weight_transfer import WeightTransfer

__all__ = [
    "BackgroundSave",
    "Checkpoint",
    "CheckpointError",
    "Engine",
    "ShardedLoader",
    "StepMetrics",
    "TrainingError",
    "WeightTransfer",
    "averaged_state_dict",
    "averaged_weights",
    "initialize",
    "plan_memory",
    "precision_name",
    "pretrained",
    "save_adapter",
]

_MODULES = {
    "BackgroundSave": "meshfold.engine.checkpoints.saving",
    "Checkpoint": "meshfold.engine.checkpoints.checkpoint",
    "CheckpointError": "meshfold.checkpoint.errors",
    "Engine": "meshfold.engine.engine",
    "ShardedLoader": "meshfold.engine.batches.loader",
    "StepMetrics": "meshfold.engine.step_metrics",
    "TrainingError": "meshfold.engine.errors",
    "WeightTransfer": "meshfold.engine.weight_transfer",
    "averaged_state_dict": "meshfold.engine.averages",
    "averaged_weights": "meshfold.engine.averages",
    "precision_name": "meshfold.engine.precision_names",
}

_INTEGRATIONS = {
    "initialize": "meshfold.colossalai",
    "plan_memory": "meshfold.planner",
    "pretrained": "meshfold.huggingface",
    "save_adapter": "meshfold.huggingface",
}
"""Names of packages that stand above this one: imported when they are asked for, if they are installed."""

moved.install()


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that ``meshfold --help`` does not wait for torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _INTEGRATIONS:
        return getattr(integration(_INTEGRATIONS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
