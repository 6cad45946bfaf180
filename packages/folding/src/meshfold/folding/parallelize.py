"""Split folding blocks over a mesh."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshfold.folding.adopt import adopt_models
from meshfold.folding.axial.axes import Axes
from meshfold.folding.axial.modes import AxialMode, find_axial_mode
from meshfold.folding.esmfold2 import MSAEncoder
from meshfold.folding.esmfold_trunk import EsmFoldTrunk
from meshfold.folding.memory import KEEP_ALL, MemorySettings
from meshfold.folding.planning import MemoryLimit
from meshfold.folding.stack import Stack
from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.spec import parse_bytes


def parallelize_folding(
    model: nn.Module,
    mesh: Mesh,
    mode: str | AxialMode = "dap",
    *,
    product_steps: int = 1,
    memory: MemorySettings | int | str = KEEP_ALL,
) -> nn.Module:
    """Split the pair and MSA tensors of every folding block in a model, in place; return the model.

    Weights stay whole on every rank. Stacks (``EvoformerStack`` ...) still take and return whole tensors, the same on every
    rank; single blocks take and return this rank's block. After backward, call :func:`.sum_gradients`.

    Models of transformers get blocks of this package, with the same parameters: see :func:`adopt_models`.

    Args:
        model: contains blocks of this package, or is a folding model of transformers.
        mesh: has the axes of the mode; one of size 1 may be missing.
        mode: name or row of the table :data:`meshfold.folding.AXIAL_MODES`.
        product_steps: pieces in which triangle multiplications send their operand; more take less memory.
        memory: chunks and recomputation, or bytes, such as ``"60GiB"``, that the tensors of each stack may have at once on a rank:
            then :func:`meshfold.folding.plan_memory` chooses for the sizes of each batch. Weights do not count.

    Raises:
        LayoutError: if the mode is unknown, the mesh has none of its axes, or the model has no folding block; for a limit in
            bytes where ESMFold 2 has an MSA encoder.
    """
    found = find_axial_mode(mode)
    if not any(axis in mesh.axes for axis in found.axes):
        raise LayoutError(
            f"axial mode {found.name!r} splits over {', '.join(found.axes)}, and {mesh} has none of these axes: "
            f"write Mesh(dict({', '.join(f'{axis}=2' for axis in found.axes)}))"
        )
    if product_steps < 1:
        raise LayoutError(f"product_steps={product_steps}: give a whole number from 1 up")
    adopt_models(model)
    modules: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "axes", None), Axes)]
    if not modules:
        raise LayoutError(
            f"{type(model).__name__} has no folding block: use those of meshfold.folding, such as EvoformerStack, or "
            "EsmForProteinFolding of transformers"
        )
    limit = parse_bytes(memory) if isinstance(memory, str) else memory
    if not isinstance(limit, MemorySettings) and any(isinstance(module, MSAEncoder) for module in modules):
        raise LayoutError(
            f"memory={memory!r}: the MSA encoder of ESMFold 2 has no plan of memory: give chunks instead, such as "
            "memory=MemorySettings(chunk_bytes=1 << 30), or msa_encoder=dict(enabled=False) in the configuration"
        )
    axes = Axes.of(mesh, found, product_steps, limit if isinstance(limit, MemorySettings) else KEEP_ALL)
    mesh.prepare(*axes.all)
    for module in modules:
        module.axes = axes
        if isinstance(module, (Stack, EsmFoldTrunk)):
            module.chooser = None if isinstance(limit, MemorySettings) else MemoryLimit(limit)
    return model
