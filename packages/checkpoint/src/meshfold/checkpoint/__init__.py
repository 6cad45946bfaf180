"""Checkpoints on disk: safetensors files, shards as rectangles, checksums, folders that a crash leaves whole."""

from __future__ import annotations

from meshfold.checkpoint.errors import CheckpointError, InUseError

__all__ = ["CheckpointError", "InUseError"]
