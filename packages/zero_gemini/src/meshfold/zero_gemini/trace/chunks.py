"""The chunks that a model's parameters would lie in, and the units that use them: from shapes alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.mesh.metadata import placed
from meshfold.zero_gemini.members import Member, lay_out_members
from meshfold.zero_gemini.norm import holders_of
from meshfold.zero_gemini.trace.workload import ChunkUse
from meshfold.zero_gemini.units import find_units


def chunk_uses(
    model: nn.Module, mesh: Mesh, *, dtype: torch.dtype | None, slot_align_elems: int = 64
) -> list[ChunkUse]:
    """The chunks that :class:`~meshfold.zero_gemini.gemini.Gemini` would make of a model, named by their first parameter.

    Args:
        model: on any device; its parameters carry their metadata.
        mesh: that it lies on.
        dtype: in which it computes; None keeps each parameter's.
        slot_align_elems: 256 under regime C.
    """
    members = {}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        meta = placed(parameter, mesh)
        holders = holders_of(meta, parameter.shape, mesh)
        computes = (dtype or parameter.dtype) if parameter.is_floating_point() else parameter.dtype
        kind = (computes, parameter.requires_grad, holders if isinstance(holders, int) else 0)
        members[name] = Member(numel=parameter.numel(), kind=kind, sum_axes=meta.sum_axes)
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    users: dict[str, dict[str, int]] = {name: {} for name in members}  # of each parameter
    for unit in find_units(model):
        for used in unit.parameters:
            users[names[used]][unit.name] = used.numel()
    uses = []
    for _, layout in lay_out_members(members, mesh, slot_align_elems=slot_align_elems):
        for chunk in layout.chunks:
            units: dict[str, int] = {}
            for name in chunk.names:
                for unit_name, elems in users[name].items():
                    units[unit_name] = units.get(unit_name, 0) + elems
            uses.append(
                ChunkUse(
                    name=chunk.names[0],
                    elems=chunk.shard_elems,
                    gathered_elems=chunk.size_elems,
                    units=units,
                    trainable=parameters[chunk.names[0]].requires_grad,
                )
            )
    return uses
