"""Roles of parameters on their way to an optimizer that is made of shards or stand-ins of them, as Muon is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from meshfold.mesh import SpecError
from meshfold.mesh.parameters import ROLE
from meshfold.optimizers import ROLES, roles_of


def note_roles(model: nn.Module, masters: Mapping[Tensor, Tensor] | None, *, pipelined: bool) -> None:
    """Let each trained parameter, and its master weight, carry its role.

    Raises:
        SpecError: for a stage of a pipeline, which does not see where the model's head is.
    """
    if pipelined:
        raise SpecError(
            "optimizer: muon tells embeddings and head from the whole model, and a stage of a pipeline has a part of it: leave "
            "pipeline out, or use adamw, lion, lamb, lars, adafactor or came"
        )
    parameters = dict(model.named_parameters())
    for name, role in roles_of(model).items():
        for tensor in (parameters[name], (masters or {}).get(parameters[name])):
            if tensor is not None:
                setattr(tensor, ROLE, role)


def groups_by_role(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return a group for each role, the empty ones too; a parameter that carries none goes by its dims."""
    groups: dict[str, list[nn.Parameter]] = {role: [] for role in ROLES}
    for parameter in parameters:
        by_dims = "matrices" if parameter.dim() == 2 else "norms_and_biases"
        groups[getattr(parameter, ROLE, by_dims)].append(parameter)
    return [{"params": found, "role": role} for role, found in groups.items()]
