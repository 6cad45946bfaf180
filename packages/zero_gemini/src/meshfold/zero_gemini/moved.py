"""Import paths of version 0.1: each gives the module of today, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "meshfold.zero_gemini.disk": "meshfold.zero_gemini.nvme",
    "meshfold.zero_gemini.trace": "meshfold.zero_gemini.profiler",
    "meshfold.zero_gemini.watched_rates": "meshfold.zero_gemini.machine_rates.observed",
}
"""Old path of a module or folder: its path today. Modules in a moved folder have moved with it."""


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
        module = import_module(new)
        spec.loader_state = module.__spec__  # the import would replace it by the old path's
        return module

    def exec_module(self, module: ModuleType) -> None:
        old = module.__spec__
        if old is not None:
            module.__spec__ = old.loader_state


def today(name: str) -> str | None:
    """Return today's path of the module that was at ``name``; None if it has not moved."""
    for old, new in MOVED.items():
        if f"{name}.".startswith(f"{old}."):
            return new + name[len(old) :]
    return None


def install() -> None:
    """Register the import hook for old paths, once."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        # In front: the finder of files would make a second module of a submodule's old path.
        sys.meta_path.insert(0, _Moved())
