"""Import paths of version 0.1: each gives the module at its current path, with a DeprecationWarning.

Does not import torch, which ``meshfold --help`` must not wait for, and so cannot use the finder of meshfold.mesh.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_CHECKPOINT = {
    "block_files": "tensors.shard_files",
    "copying": "staging",
    "extra_state": "state.extra_state",
    "folder": "folder",
    "folder_weights": "tensors.file_set",
    "names": "file_names",
    "own_files": "file_names",
    "place": "folder.writing",
    "politely": "staging",
    "rectangles": "shards",
    "removing": "folder.replacement",
    "replacing": "folder.replacement",
    "state_file": "state.state_file",
    "stored": "tensors.shard_files",
    "tensor_file": "tensors.safetensors_file",
    "tensor_files": "tensors.file_set",
    "tensor_folder": "tensors.tensor_folder",
    "torch_file": "files",
}

MOVED = {
    "meshfold.engine.cli": "meshfold.cli",
    "meshfold.engine.compat": "meshfold.colossalai",
    "meshfold.engine.data": "meshfold.data",
    "meshfold.engine.hugging_face": "meshfold.huggingface",
    "meshfold.engine.lightning": "meshfold.lightning",
    "meshfold.engine.models": "meshfold.models",
    "meshfold.engine.nodes": "meshfold.engine.world",
    "meshfold.engine.planning": "meshfold.planner",
    "meshfold.engine.training": "meshfold.train",
    **{f"meshfold.engine.checkpoints.{old}": f"meshfold.checkpoint.{new}" for old, new in _CHECKPOINT.items()},
}
"""Old path of a module or package: the path of today."""


class _Moved(MetaPathFinder, Loader):
    """Import hook that finds modules under their old paths. Both paths give the same module object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if today(fullname) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = today(spec.name)
        if new is None:
            raise ImportError(f"{spec.name!r} has not moved", name=spec.name)
        warnings.warn(f"{spec.name} is now {new}: change the import", DeprecationWarning, stacklevel=2)
        module = integration(new)
        spec.loader_state = module.__spec__  # the import would replace it by the old path's
        return module

    def exec_module(self, module: ModuleType) -> None:
        old = module.__spec__
        if old is not None:
            module.__spec__ = old.loader_state


def today(name: str) -> str | None:
    """Return the path of today of a module that was once at ``name``; None for one that has not moved."""
    for old, new in MOVED.items():
        if f"{name}.".startswith(f"{old}."):
            return new + name[len(old) :]
    return None


def install() -> None:
    """Let imports find the old paths."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())  # in front: the file finder would make a second module


def integration(module: str) -> ModuleType:
    """Import a module of a distribution that needs this one.

    Raises:
        ModuleNotFoundError: if it is not installed, with the line that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = ".".join(module.split(".")[:2])
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # the package is there, but one of its dependencies is missing
        distribution = package.replace(".", "-").replace("_", "-")
        raise ModuleNotFoundError(f"{package} is not installed: pip install {distribution}", name=error.name) from error
