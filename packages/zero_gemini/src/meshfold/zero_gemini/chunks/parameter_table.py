"""Facts about a model's parameters that never change, wherever their elements are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, ParameterMeta
from meshfold.mesh.parameters import metadata_on
from meshfold.zero_gemini.chunks.groups import Member
from meshfold.zero_gemini.norm import holders_of


@dataclass(frozen=True)
class Kind:
    """Properties that all parameters of a chunk share."""

    dtype: torch.dtype
    trained: bool
    holders: int  # 0: not the same for all elements


@dataclass(frozen=True, kw_only=True)
class Known:
    """Facts about a parameter that never change; its tensor comes and goes."""

    parameter: nn.Parameter
    meta: ParameterMeta
    shape: torch.Size
    kind: Kind
    holders: int | Tensor = field(compare=False)


def known_of(
    model: nn.Module,
    mesh: Mesh,
    dtype: torch.dtype | None,
    other: Mapping[Tensor, torch.dtype] = MappingProxyType({}),
) -> dict[str, Known]:
    """Return the facts about a model's parameters, by name, in order of registration.

    Args:
        model: on any device; its parameters carry their metadata.
        mesh: where blocks over the tensor axes lie.
        dtype: in which the model will compute; None keeps each parameter's.
        other: parameters that will be in another dtype.
    """
    known = {}
    for name, parameter in model.named_parameters():
        meta = metadata_on(parameter, mesh)
        holders = holders_of(meta, parameter.shape, mesh)
        kind = Kind(
            other.get(parameter, dtype or parameter.dtype)
            if parameter.is_floating_point()
            else parameter.dtype,
            parameter.requires_grad,
            holders if isinstance(holders, int) else 0,
        )
        known[name] = Known(parameter=parameter, meta=meta, shape=parameter.shape, kind=kind, holders=holders)
    return known


def members_of(known: Mapping[str, Known]) -> dict[str, Member]:
    """The parameters as far as their places in chunks go."""
    return {
        name: Member(numel=one.shape.numel(), kind=one.kind, sum_axes=one.meta.sum_axes)
        for name, one in known.items()
    }
