"""Roles of parameters, copied to the shards or stand-ins that an optimizer such as Muon receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from meshfold.mesh.parameters import ROLE, metadata
from meshfold.optimizers import ROLES, roles_of


def note_roles(model: nn.Module) -> None:
    """Attach its role to each trained parameter of a whole model; call it before the model is cut into stages."""
    parameters = dict(model.named_parameters())
    for name, role in roles_of(model, shape_of=_whole_shape).items():
        setattr(parameters[name], ROLE, role)


def _whole_shape(parameter: Tensor) -> tuple[int, ...]:
    meta = metadata(parameter)
    return tuple(parameter.shape) if meta is None else meta.placement.shape


def pass_roles_on(masters: Mapping[Tensor, Tensor]) -> None:
    """Attach to master weights the roles of their parameters, the keys."""
    for parameter, master in masters.items():
        if hasattr(parameter, ROLE):
            setattr(master, ROLE, getattr(parameter, ROLE))


def groups_by_role(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return a group for each role, including empty ones; a parameter without a role is grouped by its dims."""
    groups: dict[str, list[nn.Parameter]] = {role: [] for role in ROLES}
    for parameter in parameters:
        by_dims = "matrices" if parameter.dim() == 2 else "norms_and_biases"
        groups[getattr(parameter, ROLE, by_dims)].append(parameter)
    return [{"params": found, "role": role} for role, found in groups.items()]
