"""Checkpoints on disk: safetensors files, shards as rectangles, checksums, crash-safe folders.

The names here are what a program of its own needs. The folders (``tensors``, ``shards``, ``folder``, ``state``, ``staging``,
``files``) have more, for a run whose ranks each write a part.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshfold.checkpoint.errors import CheckpointError, FileWriteError, InUseError
from meshfold.mesh import redirect_imports

if TYPE_CHECKING:
    from meshfold.checkpoint.files import read_torch_file, write_atomically
    from meshfold.checkpoint.folder import (
        complete_checkpoints,
        hold_lock,
        is_complete,
        latest,
        new_checkpoint,
        open_checkpoint,
        prune,
        remove_checkpoint,
        step_folder,
        step_of,
    )
    from meshfold.checkpoint.tensors import (
        TensorFile,
        TensorInfo,
        TensorWriter,
        has_weights,
        open_weights,
        verify_checksums,
    )

__all__ = [
    "CheckpointError",
    "FileWriteError",
    "InUseError",
    "TensorFile",
    "TensorInfo",
    "TensorWriter",
    "complete_checkpoints",
    "has_weights",
    "hold_lock",
    "is_complete",
    "latest",
    "new_checkpoint",
    "open_checkpoint",
    "open_weights",
    "prune",
    "read_torch_file",
    "remove_checkpoint",
    "step_folder",
    "step_of",
    "verify_checksums",
    "write_atomically",
]

_FOLDERS = {
    "files": ("read_torch_file", "write_atomically"),
    "folder": (
        *("complete_checkpoints", "hold_lock", "is_complete", "latest", "new_checkpoint", "open_checkpoint", "prune"),
        *("remove_checkpoint", "step_folder", "step_of"),
    ),
    "tensors": ("TensorFile", "TensorInfo", "TensorWriter", "has_weights", "open_weights", "verify_checksums"),
}

redirect_imports({"meshfold.checkpoint.tensor_file": "meshfold.checkpoint.tensors"})


def __getattr__(name: str) -> Any:
    """Import a name at its first use: who only catches an error needs no numpy."""
    for folder, names in _FOLDERS.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{folder}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
