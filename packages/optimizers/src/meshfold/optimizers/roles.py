"""Roles of a model's parameters, which Muon needs: matrices, embeddings, the output head, norms and biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

MATRICES = "matrices"
ROLES = (MATRICES, "embeddings", "head", "norms_and_biases")
"""Roles, in the order of :func:`role_groups`."""
_EXPERTS = ("expert", "moe")


def roles_of(
    model: nn.Module, *, shape_of: Callable[[Tensor], tuple[int, ...]] = lambda parameter: tuple(parameter.shape)
) -> dict[str, str]:
    """Return the role of each trained parameter, by name.

    Embeddings are the weights of modules whose class has ``Embedding`` in its name. The head is the weight of
    ``model.get_output_embeddings()``, or else of the last linear layer if it has as many rows as an embedding. A head that is tied
    to an embedding counts as that. Other parameters with two dims are matrices. So are parameters with three dims if the module's
    class has ``Expert`` or ``Moe`` in its name: a matrix for each expert.

    Args:
        model: the whole of it.
        shape_of: the shape of the whole tensor, where parameters are blocks.
    """
    embeddings: set[Tensor] = set()
    stacks: set[Tensor] = set()
    rows: set[int] = set()
    linear: Tensor | None = None
    for module in model.modules():
        if any(word in type(module).__name__.lower() for word in _EXPERTS):
            stacks.update(p for p in module.parameters(recurse=False) if p.dim() == 3)
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or weight.dim() != 2:
            continue
        if "Embedding" in type(module).__name__:
            embeddings.add(weight)
            rows.add(shape_of(weight)[0])
        else:
            linear = weight
    head = _named_head(model)
    if head is None and linear is not None and shape_of(linear)[0] in rows:
        head = linear
    return {name: _role(p, embeddings, head, stacks) for name, p in model.named_parameters() if p.requires_grad}


def role_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return a group of parameters for each role, for :class:`meshfold.optimizers.Muon`; the empty ones too.

    Example::

        optimizer = Muon(role_groups(model), lr=0.02, adamw_lr=3e-4)
    """
    roles, parameters = roles_of(model), dict(model.named_parameters())
    return [
        {"params": [parameters[name] for name, found in roles.items() if found == role], "role": role} for role in ROLES
    ]


def _named_head(model: nn.Module) -> Tensor | None:
    find = getattr(model, "get_output_embeddings", None)
    found = find() if callable(find) else None
    weight = getattr(found, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def _role(parameter: Tensor, embeddings: set[Tensor], head: Tensor | None, stacks: set[Tensor]) -> str:
    if parameter in embeddings:
        return "embeddings"
    if parameter is head:
        return "head"
    return MATRICES if parameter.dim() == 2 or parameter in stacks else "norms_and_biases"
