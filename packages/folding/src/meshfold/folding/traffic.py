"""The traffic of a folding model, from its layouts alone: every collective of a forward and a backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from meshfold.folding.axial.axes import Axes
from meshfold.folding.axial.sizes import Sizes
from meshfold.folding.esmfold_trunk import EsmFoldTrunk
from meshfold.folding.gradient_sums import split_parameters
from meshfold.folding.template import TemplatePairStack
from meshfold.tensor_parallel import Cost, CostEntry


def folding_cost(
    model: nn.Module,
    *,
    residues: int,
    sequences: int = 1,
    batch: int = 1,
    templates: int = 1,
    recycles: int = 0,
    itemsize: int = 4,
) -> Cost:
    """Return the collectives of a forward, a backward and :func:`.sum_gradients`, as each rank sees them.

    The phases are ``forward``, ``backward`` and ``gradients``. Needs no other process: the mesh may be ``Mesh(axes, rank=0)``.
    Settings of memory are not counted: chunks send the same bytes in more messages, and recomputation sends those of forward again.

    Args:
        model: after :func:`.parallelize_folding`; on the meta device too. Inputs of stacks are taken to need a gradient.
        residues: tokens of a chain, without padding.
        sequences: of the MSA, without padding.
        batch: samples.
        templates: of each sample.
        recycles: passes of an ESMFold trunk before the last one; they have no backward.
        itemsize: bytes of an element.
    """
    sizes = Sizes(residues=residues, sequences=sequences, batch=batch, templates=templates, itemsize=itemsize)
    again = [
        entry
        for module in model.modules()
        if isinstance(module, EsmFoldTrunk)
        for entry in _of(module, sizes)
        if entry.phase == "forward"
    ]
    return Cost((*again * recycles, *_of(model, sizes), *_sums(model, itemsize)))


def _of(module: nn.Module, sizes: Sizes) -> Iterator[CostEntry]:
    found = getattr(module, "traffic", None)
    if callable(found):
        yield from found(sizes)
        return
    if isinstance(module, TemplatePairStack):
        sizes = replace(sizes, batch=sizes.batch * sizes.templates, templates=1)
    own = getattr(module, "own_traffic", None)
    if callable(own):
        yield from own(sizes)
    for child in module.children():
        yield from _of(child, sizes)


def _sums(model: nn.Module, itemsize: int) -> Iterator[CostEntry]:
    elements: dict[Axes, int] = {}
    for parameter, axes in split_parameters(model).values():
        elements[axes] = elements.get(axes, 0) + parameter.numel()
    for axes, count in elements.items():
        if axes.is_split:
            spanned = axes.mesh.spanned(*axes.all)
            yield CostEntry("gradients", "all_reduce", "dw", spanned, axes.multiple, count * itemsize)
