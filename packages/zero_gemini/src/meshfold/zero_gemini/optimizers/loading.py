"""Bit-exact loading of optimizer state: torch's own load_state_dict would cast all of it to the parameter's dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshfold.zero_gemini.optimizers import slots


class _Sealed:
    """Wrapper around one parameter's saved state, so that torch passes it on unchanged."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


@contextmanager
def exactly(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager: inside, ``load_state_dict`` copies state unchanged.

    Hooks do this. They run after the user's pre-hooks and before the user's post-hooks, which see what they would see with any
    other optimizer.
    """
    before = optimizer.register_load_state_dict_pre_hook(_seal)
    after = optimizer.register_load_state_dict_post_hook(_open, prepend=True)
    groups, state = optimizer.param_groups, optimizer.state
    try:
        yield
    except BaseException:
        optimizer.param_groups, optimizer.state = groups, state
        raise
    finally:
        before.remove()
        after.remove()


def _seal(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    groups = []
    for place, group in enumerate(saved["param_groups"]):
        own = optimizer.param_groups[place] if place < len(optimizer.param_groups) else optimizer.defaults
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                raise ValueError(
                    f"the saved state is of an Adam with {name}={group[name]!r}, which {type(optimizer).__name__} does not "
                    "have: load it into torch.optim.AdamW"
                )
        if group.get("regime", own["regime"]) != own["regime"]:
            raise ValueError(
                f"the saved state of group {place} is of regime {group['regime']!r}, and this optimizer keeps regime "
                f"{own['regime']!r}: make it with regime={group['regime']!r}"
            )
        theirs = {key: group[key] for key in group if key in own or key == "param_names"}
        if "decoupled_weight_decay" in group:  # torch's name
            theirs.setdefault("adamw_mode", bool(group["decoupled_weight_decay"]))
        kept = {key: value for key, value in own.items() if key not in ("params", "param_names")}
        groups.append({**kept, **theirs})
    state = {key: _Sealed(value) if isinstance(value, dict) else value for key, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def _open(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found: Any = optimizer.state.get(parameter)
            if isinstance(found, _Sealed):
                if any(isinstance(value, Tensor) for value in found.state.values()):
                    optimizer.state[parameter] = slots.taken(parameter, found.state, group["regime"])
                else:
                    del optimizer.state[parameter]
