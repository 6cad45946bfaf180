"""Table of a model's parameters: facts that never change, and the layout of all of them in chunks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from meshfold.kernels import Fp8Weight
from meshfold.mesh import Mesh, ParameterMeta
from meshfold.mesh.parameters import metadata_on
from meshfold.zero_gemini.chunks.chunk_size import MIN_CHUNK_ELEMS, even_chunk_size, search_chunk_size
from meshfold.zero_gemini.chunks.layout import ChunkLayout, Item, lay_out, round_up
from meshfold.zero_gemini.norm import holders_of


@dataclass(frozen=True)
class Kind:
    """Properties that all parameters of a chunk share."""

    dtype: torch.dtype
    trained: bool
    holders: int  # ranks that hold an element; 0 if that differs between elements
    fp8: int = 0  # operands in fp8 that forward and backward gather of them: 2, or 1 for both; 0: they are gathered as they are


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """Facts about a parameter that never change, while its tensor does."""

    parameter: nn.Parameter
    meta: ParameterMeta
    shape: torch.Size
    kind: Kind
    holders: int | Tensor = field(compare=False)


def parameter_facts(
    model: nn.Module,
    mesh: Mesh,
    dtype: torch.dtype | None,
    other: Mapping[Tensor, torch.dtype] = MappingProxyType({}),
    in_fp8: Mapping[Tensor, Fp8Weight] = MappingProxyType({}),
) -> dict[str, ParameterFacts]:
    """Return the facts about a model's parameters, by name, in order of registration.

    Args:
        model: on any device; its parameters carry their metadata.
        mesh: the mesh of the blocks over the tensor axes.
        dtype: in which the model will compute; None keeps each parameter's.
        other: parameters that will be in another dtype.
        in_fp8: parameters that are gathered in fp8, with what multiplies them.
    """
    facts = {}
    for name, parameter in model.named_parameters():
        meta = metadata_on(parameter, mesh)
        holders = holders_of(meta, parameter.shape, mesh)
        kind = Kind(
            other.get(parameter, dtype or parameter.dtype) if parameter.is_floating_point() else parameter.dtype,
            parameter.requires_grad,
            holders if isinstance(holders, int) else 0,
            in_fp8[parameter].encodings if parameter in in_fp8 else 0,
        )
        facts[name] = ParameterFacts(parameter=parameter, meta=meta, shape=parameter.shape, kind=kind, holders=holders)
    return facts


def members_of(facts: Mapping[str, ParameterFacts]) -> dict[str, Member]:
    """Return the parameters as items of a chunk layout."""
    return {
        name: Member(numel=one.shape.numel(), kind=one.kind, sum_axes=one.meta.sum_axes) for name, one in facts.items()
    }


PARTS = 16
"""Chunks that even a small model has, about, so that some of them can be off the device."""
LEAST_ELEMS = 2**16
"""Chunks of fewer elements are not worth a collective."""
MOST_OF_UNIT_ELEMS = 192 * 2**20
"""Elements of a chunk of one unit at most: 768 MiB of gradients in float32, which wait for the last of them."""


def slot_alignment(regime: str) -> int:
    """Return the number of elements that each parameter's start is aligned to: 8-bit moments share a scale every 256."""
    return 256 if regime == "C" else 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Parameter as an item of a chunk layout."""

    numel: int
    """elements on this rank, over the tensor axes"""
    kind: Hashable
    """properties that all parameters of a chunk share"""
    sum_axes: tuple[str, ...]
    """axes that its gradient is summed over: their ranks share its chunk"""


def lay_out_members(
    members: Mapping[str, Member],
    mesh: Mesh,
    *,
    slot_align_elems: int,
    chunk_elems: int | None = None,
    unit_of: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[tuple[str, ...], ChunkLayout]]:
    """Return the chunks of every set of axes that gradients are summed over, in order of registration.

    Chunks that never move need not be small. With ``unit_of``, a unit that is larger than a chunk has chunks of its own: one, or as
    few as ``MOST_OF_UNIT_ELEMS`` allows, of about the same size. A block then needs one collective where it needed one for each 16
    to 64 million elements.

    Args:
        members: parameters by name, in order of registration, tied ones once.
        mesh: says how many ranks share a chunk.
        slot_align_elems: each parameter begins at a multiple of this.
        chunk_elems: size of a chunk in elements; None searches for the least waste.
        unit_of: the unit of each parameter, by name, where all chunks stay on the device.
    """
    found = []
    for axes in dict.fromkeys(member.sum_axes for member in members.values()):
        ranks = mesh.size(*axes)
        items = [
            Item(name, member.numel, member.kind)
            for name, member in members.items()
            if member.sum_axes == axes and member.numel
        ]
        least = min(MIN_CHUNK_ELEMS, max(LEAST_ELEMS, sum(item.numel for item in items) // PARTS))
        size = chunk_elems or _size(items, ranks, least)
        larger = {} if chunk_elems or ranks == 1 else _larger(items, unit_of, size, slot_align_elems)
        items = [replace(item, group=own) if (own := _own_group(item, unit_of)) in larger else item for item in items]
        if larger and (rest := [item for item in items if item.group not in larger]):
            size = _size(rest, ranks, least)
        found.append((axes, lay_out(items, size, ranks, larger=larger, slot_align_elems=slot_align_elems)))
    return found


def _own_group(item: Item, unit_of: Mapping[str, str]) -> Hashable:
    """Return the group of a parameter that lies with those of its unit alone."""
    return (item.group, unit_of.get(item.name, ""))


def _larger(items: Sequence[Item], unit_of: Mapping[str, str], size: int, slot_align_elems: int) -> dict[Hashable, int]:
    """Return the most elements of a chunk of each unit that is larger than ``size``, by group."""
    units: dict[Hashable, list[int]] = {}
    for item in items:
        if item.name in unit_of:
            units.setdefault(_own_group(item, unit_of), []).append(round_up(item.numel, slot_align_elems))
    most = max(size, MOST_OF_UNIT_ELEMS)
    kinds = {tuple(numels) for numels in units.values() if sum(numels) > size}  # few: blocks are alike
    found = {numels: even_chunk_size(numels, most) for numels in kinds}
    return {group: found[tuple(numels)] for group, numels in units.items() if tuple(numels) in found}


def _size(items: Sequence[Item], ranks: int, least: int) -> int:
    """Return the elements of a chunk: from ``least`` to four times as many, with the least waste."""
    return search_chunk_size(items, ranks, min_elems=least, max_elems=4 * least).chunk_elems
