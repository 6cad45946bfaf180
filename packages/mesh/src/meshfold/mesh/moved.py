"""Import paths of version 0.1: each gives the module of today, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Not here: the modules ``launch`` and ``metadata``, whose names the functions of the package have.
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
    "shown_gradient": "parameters.shown_gradient",
    "targets": "model_io.labels",
    "traffic": "recording.traffic",
    "when_read": "model_io.lazy_tensor",
    "without_values": "model_io.dry_run",
}
"""Old name of a module of meshfold.mesh: its path today."""


class _Moved(MetaPathFinder, Loader):
    """Finds modules under their old paths. A module under two paths is one module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.removeprefix("meshfold.mesh.") in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = f"meshfold.mesh.{MOVED[spec.name.removeprefix('meshfold.mesh.')]}"
        warnings.warn(f"{spec.name} is now {new}: change the import", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        spec.loader_state = module.__spec__  # which the import would replace by this one
        return module

    def exec_module(self, module: ModuleType) -> None:
        old = module.__spec__
        if old is not None:
            module.__spec__ = old.loader_state


def install() -> None:
    """Let imports find the old paths."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
