"""Import paths of version 0.1: each gives the module at its current path, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Without the modules ``launch`` and ``metadata``, whose names now belong to functions.
MOVED = {
    "argument_checks": "spec.argument_checks",
    "deferral": "parameters.deferred_wgrad",
    "documents": "model_io.labels",
    "environment": "processes.environment",
    "first_values": "initialization.parameter_values",
    "groups": "processes.groups",
    "names": "parameters.parameter_meta",
    "norms": "parameters.grad_norm",
    "primitives": "collectives.primitives",
    "process_group": "processes.process_group",
    "recorder": "recording.comm_log",
    "shown_gradient": "parameters.gradient_proxy",
    "targets": "model_io.labels",
    "traffic": "recording.comm_log",
    "when_read": "model_io.lazy_tensor",
    "without_values": "model_io.dry_run",
}
"""Old name of a module of meshfold.mesh: its path today."""


class _OldPaths(MetaPathFinder, Loader):
    """Import hook that finds modules under their old paths. Both paths give the same module object."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self.moved = moved

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if self._today(fullname) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = self._today(spec.name)
        if new is None:
            raise ImportError(f"{spec.name!r} has not moved", name=spec.name)
        warnings.warn(f"{spec.name} is now {new}: change the import", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        spec.loader_state = module.__spec__  # the import would replace it by the old path's
        return module

    def exec_module(self, module: ModuleType) -> None:
        old = module.__spec__
        if old is not None:
            module.__spec__ = old.loader_state

    def _today(self, name: str) -> str | None:
        """Return the current path of the module that was at ``name``; None if it has not moved."""
        for old, new in self.moved.items():
            if name == old or name.startswith(f"{old}."):
                return new + name[len(old) :]
        return None


def redirect_imports(moved: Mapping[str, str]) -> None:
    """Let imports find modules under their old paths, with a DeprecationWarning that names the current path.

    Args:
        moved: old path of a module or folder to its path today. Modules in a moved folder have moved with it.
    """
    if not any(isinstance(finder, _OldPaths) and finder.moved == moved for finder in sys.meta_path):
        # In front: the file finder would make a second module of a submodule's old path.
        sys.meta_path.insert(0, _OldPaths(moved))


def install() -> None:
    """Let imports find the old paths of meshfold.mesh."""
    redirect_imports({f"meshfold.mesh.{old}": f"meshfold.mesh.{new}" for old, new in MOVED.items()})
