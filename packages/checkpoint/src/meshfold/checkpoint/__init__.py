"""Checkpoints on disk: safetensors files, shards as rectangles, checksums, crash-safe folders."""

from __future__ import annotations

from meshfold.checkpoint.errors import CheckpointError, InUseError
from meshfold.mesh import redirect_imports

__all__ = ["CheckpointError", "InUseError"]

redirect_imports({"meshfold.checkpoint.tensor_file": "meshfold.checkpoint.tensors"})
