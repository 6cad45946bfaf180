"""The chunks that a model's parameters lie in, or would, and the units that use them: from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.zero_gemini.chunks.layout import ChunkSpec
from meshfold.zero_gemini.chunks.parameter_table import Known, known_of, lay_out_members, members_of
from meshfold.zero_gemini.profiler.workload import ChunkUse
from meshfold.zero_gemini.runtime.units import Unit, find_units


class Named(NamedTuple):
    """A chunk: what to call it, what lies in it, and whether it is trained."""

    name: str
    spec: ChunkSpec
    trained: bool


def uses_of(chunks: Iterable[Named], units: Iterable[Unit], known: Mapping[str, Known]) -> list[ChunkUse]:
    """The chunks, with the units that need them: what a plan is made of.

    Args:
        chunks: in any order.
        units: of the model.
        known: its parameters, by name.
    """
    names: dict[Tensor, str] = {one.parameter: name for name, one in known.items()}
    users: dict[str, list[str]] = {name: [] for name in known}  # of each parameter
    for unit in units:
        for used in unit.parameters:
            users[names[used]].append(unit.name)
    uses = []
    for chunk in chunks:
        needed: dict[str, int] = {}
        for name in chunk.spec.names:
            for unit_name in users[name]:
                needed[unit_name] = needed.get(unit_name, 0) + known[name].shape.numel()
        uses.append(
            ChunkUse(
                name=chunk.name, elems=chunk.spec.shard_elems, gathered_elems=chunk.spec.size_elems, units=needed,
                trainable=chunk.trained,
            )
        )  # fmt: skip
    return uses


def chunk_uses(
    model: nn.Module,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None,
    other_dtypes: Mapping[Tensor, torch.dtype] = MappingProxyType({}),
    slot_align_elems: int = 64,
) -> list[ChunkUse]:
    """The chunks that :class:`~meshfold.zero_gemini.gemini.Gemini` would make of a model, named by their first parameter.

    Args:
        model: on any device; its parameters carry their metadata.
        mesh: that it lies on.
        dtype: in which it computes; None keeps each parameter's.
        other_dtypes: parameters that it has in another dtype.
        slot_align_elems: 256 under regime C.
    """
    known = known_of(model, mesh, dtype, other_dtypes)
    laid = lay_out_members(members_of(known), mesh, slot_align_elems=slot_align_elems)
    chunks = (
        Named(chunk.names[0], chunk, known[chunk.names[0]].kind.trained)
        for _, layout in laid
        for chunk in layout.chunks
    )
    return uses_of(chunks, find_units(model), known)
