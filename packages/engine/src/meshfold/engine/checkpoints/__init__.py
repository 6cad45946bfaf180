"""Checkpoint folders of whole models, written and read by any mesh."""

from __future__ import annotations

from meshfold.engine.checkpoints.checkpoint import MODEL_FILE, Checkpoint, write_checkpoint
from meshfold.engine.checkpoints.model_state import ModelState, describe_model, read_whole, with_plain_names

__all__ = [
    "MODEL_FILE",
    "Checkpoint",
    "ModelState",
    "describe_model",
    "read_whole",
    "with_plain_names",
    "write_checkpoint",
]
