"""Memory, traffic and time of a spec, before anything runs. :mod:`meshfold.planner.report` prints them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfold.planner.attention_choice import AttentionChoice, choose_attention, choose_spec
    from meshfold.planner.estimates import (
        Estimate,
        Memory,
        StepSpeed,
        Times,
        Traffic,
        step_speed,
        step_times,
    )
    from meshfold.planner.fitting import explain_misfit, fits, suggest_change
    from meshfold.planner.known_machines import MACHINES, find_machine, unlimited_machine
    from meshfold.planner.machines import PEAK_TFLOPS, Host, Machine
    from meshfold.planner.planner import estimate, plan_memory
    from meshfold.planner.power import under_power_cap
    from meshfold.planner.suggestions import Option, Rejected, Suggestion, suggest

__all__ = [
    "MACHINES",
    "PEAK_TFLOPS",
    "AttentionChoice",
    "Estimate",
    "Host",
    "Machine",
    "Memory",
    "Option",
    "Rejected",
    "StepSpeed",
    "Suggestion",
    "Times",
    "Traffic",
    "choose_attention",
    "choose_spec",
    "estimate",
    "explain_misfit",
    "find_machine",
    "fits",
    "plan_memory",
    "step_speed",
    "step_times",
    "suggest",
    "suggest_change",
    "under_power_cap",
    "unlimited_machine",
]

_MODULES = {
    "attention_choice": ("AttentionChoice", "choose_attention", "choose_spec"),
    "estimates": ("Estimate", "Memory", "StepSpeed", "Times", "Traffic", "step_speed", "step_times"),
    "fitting": ("explain_misfit", "fits", "suggest_change"),
    "known_machines": ("MACHINES", "find_machine", "unlimited_machine"),
    "machines": ("PEAK_TFLOPS", "Host", "Machine"),
    "planner": ("estimate", "plan_memory"),
    "power": ("under_power_cap",),
    "suggestions": ("Option", "Rejected", "Suggestion", "suggest"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


class _Package(ModuleType):
    """Keeps ``meshfold.planner.estimate`` a function even if the old module of that name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "estimate" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
