"""The spec's entry ``axial``: pair and MSA tensors of folding blocks over the ranks of its axes.

Weights are whole on every rank. Those of blocks see blocks of tensors, so their gradients are parts of a sum over the axial
axes, which is made together with the sum over the data axes: in buckets or chunks, under ZeRO too. What is outside the
blocks sees whole tensors on every axial rank, and its gradients are whole.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from meshfold.engine.world import World
from meshfold.mesh import LayoutError, SpecError, annotate
from meshfold.mesh.parameters import metadata_on


def split_folding(model: nn.Module, world: World) -> None:
    """Split the tensors of every folding block in a model, and plan their memory; nothing without the entry ``axial``.

    Raises:
        SpecError: for a model without folding blocks.
    """
    axial = world.spec.axial
    if axial is None or (axial.size == 1 and axial.memory is None):
        return
    from meshfold.folding import parallelize_folding

    try:
        limit = {} if axial.memory is None else {"memory": axial.memory}
        parallelize_folding(model, world.mesh, axial.mode_name, **limit)
    except LayoutError as error:
        raise SpecError(f"{world.spec.written or world.spec}: {error}") from error


def sum_over_axial_axes(model: nn.Module, world: World) -> None:
    """Let the gradients of folding blocks be summed over the axial axes too; nothing without the entry ``axial``."""
    if world.spec.axial is None or world.spec.axial.size == 1:
        return
    from meshfold.folding import split_parameters

    inner = (*world.outer_axes, *world.spec.axial.axes)
    axes = tuple(axis for axis in world.mesh.names if axis in inner)
    for parameter, _ in split_parameters(model).values():
        annotate(parameter, replace(metadata_on(parameter, world.mesh), sum_axes=axes, own_sum_axes=True))
