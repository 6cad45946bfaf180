"""Size of the state of an optimizer of whole matrices, whose parameters have owners, before any of it exists."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.mesh.parameters import OptimizerProbeError, state_bytes
from meshfold.zero_gemini.chunks.parameter_table import lay_out_members, members_of, parameter_facts
from meshfold.zero_gemini.optimizer.dispatch import StateSize
from meshfold.zero_gemini.optimizer.parameter_owners import Owners
from meshfold.zero_gemini.runtime.units import unit_of_each


def owned_state_size(
    model: nn.Module,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer,
    stand_ins: Mapping[Tensor, Tensor],
    *,
    dtype: torch.dtype,
    master_dtype: torch.dtype,
    other_dtypes: Mapping[Tensor, torch.dtype] = MappingProxyType({}),
    slot_align_elems: int = 64,
    stays: bool = False,
) -> StateSize:
    """Return the size of the state of the rank that owns most: its master weights, and what the optimizer keeps for them.

    Numbers are a mean over the elements of that rank's shards. It is the same on all ranks that share chunks.

    Args:
        model: on any device; its parameters carry their metadata.
        mesh: of the model.
        optimizer: of stand-ins for the model's trained parameters, with their shapes; it is not changed and does not step.
        stand_ins: the stand-in of each trained parameter.
        dtype: that the model computes in.
        master_dtype: of the master weights.
        other_dtypes: parameters that the model has in another dtype.
        slot_align_elems, stays: as for :func:`~meshfold.zero_gemini.profiler.chunk_uses`.
    """
    facts = parameter_facts(model, mesh, dtype, other_dtypes)
    whole = {stand_ins[one.parameter]: one.meta.placement.shape for one in facts.values() if one.parameter in stand_ins}
    try:
        kept = state_bytes(optimizer, master_dtype, lambda parameter: whole.get(parameter, tuple(parameter.shape)))
    except OptimizerProbeError:
        return StateSize(ours=False)
    held = elements = 0
    unit_of = unit_of_each(model) if stays else {}
    for axes, layout in lay_out_members(members_of(facts), mesh, slot_align_elems=slot_align_elems, unit_of=unit_of):
        owners, ranks = Owners(), tuple(range(mesh.size(*axes)))
        owned = [0] * len(ranks)
        for chunk in layout.chunks:
            if not facts[chunk.names[0]].kind.trained:
                continue
            elements += chunk.shard_elems
            separate = len(ranks) > 1 or dtype != master_dtype  # else the shard is also the master weights
            for name, owner in owners.choose(chunk, ranks).items():
                weights = facts[name].shape.numel() * master_dtype.itemsize * separate
                owned[owner] += weights + kept.get(stand_ins[facts[name].parameter], 0)
        held += max(owned)
    if not elements:
        return StateSize(ours=False)
    return StateSize(held / (elements * master_dtype.itemsize) - (dtype != master_dtype), ours=False)
