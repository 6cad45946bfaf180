"""What a spec holds, moves and waits for, before anything runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfold.planner.estimate import Estimate
    from meshfold.planner.machines import Machine
    from meshfold.planner.memory_plan import plan_memory
    from meshfold.planner.planner import estimate

__all__ = ["Estimate", "Machine", "estimate", "plan_memory"]

_MODULES = {
    "Estimate": "estimate",
    "Machine": "machines",
    "plan_memory": "memory_plan",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
