"""Twins of an optimizer, which step some of its parameters while it stays as it is."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups, without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def twin_of(
    optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]], of: Mapping[Tensor, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer that shares everything but its groups, state and hooks; it has no state and no hooks.

    Args:
        optimizer: is not changed.
        settings: of the groups.
        of: what the twin has instead of each of the optimizer's parameters; it has no others.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for key, value in [*vars(optimizer).items()]:  # another thread may set one meanwhile
        if key != "step":  # schedulers wrap it, bound to the optimizer
            vars(twin)[key] = OrderedDict() if key.endswith("_hooks") else value
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**mine, "params": [of[p] for p in group["params"] if p in of]}
        for mine, group in zip(settings, optimizer.param_groups, strict=True)
    ]
    return twin
