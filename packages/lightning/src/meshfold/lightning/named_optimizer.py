"""Optimizers by name in a LightningModule, as an engine takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshfold.engine.optimizers import note_roles, optimizer_factory
from meshfold.mesh import SpecError


def named_optimizer(module: nn.Module, optimizer: str | Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer that ``Engine(optimizer=...)`` makes, of a module's trained parameters, for ``configure_optimizers``.

    Without a strategy of Meshfold it is the same optimizer of whole parameters.

    Args:
        module: whose parameters; all of a model, so that the roles that Muon and GaLore need are found.
        optimizer: ``dict(name="lamb", lr=...)``, as the engine takes it.

    Raises:
        SpecError: for an unknown name or setting, or None.
    """
    factory = optimizer_factory(optimizer, whole=True)  # the strategy checks whether it can step shards
    if factory is None:
        raise SpecError("optimizer=None: write dict(name='adamw', lr=3e-4), or return None from configure_optimizers")
    note_roles(module)
    return factory([parameter for parameter in module.parameters() if parameter.requires_grad])
