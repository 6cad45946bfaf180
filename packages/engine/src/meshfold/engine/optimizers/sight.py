"""Norms, sums over dims and matrices of whole tensors, for an optimizer on a rank that has only blocks of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshfold.engine.optimizers import check_sight
from meshfold.engine.world import World
from meshfold.kernels import STEP_KERNELS
from meshfold.mesh import SpecError, metadata
from meshfold.mesh.parameters import sharded_blocks, square_sums_of_blocks
from meshfold.optimizers import OptimizerSettingError


def give_sight(optimizer: torch.optim.Optimizer, targets: Mapping[str, Tensor], world: World) -> None:
    """Give an optimizer of this rank's blocks the sums and matrices that it asks for. All ranks must call.

    Args:
        optimizer: of the targets; with an attribute ``square_sums`` or ``blocks`` if it asks.
        targets: the tensors it updates, by name, equal on all data ranks.
        world: where they lie.

    Raises:
        SpecError: for one that does not ask, and would step otherwise than in one process.
    """
    tensors, asked = list(targets.values()), optimizer.__dict__
    if hasattr(optimizer, "kernels"):
        asked["kernels"] = STEP_KERNELS
    if getattr(optimizer, "sight", None) == "norms":
        asked["square_sums"] = square_sums_of_blocks(tensors, world.mesh, world.device)
    elif hasattr(optimizer, "blocks"):
        blocks = asked["blocks"] = sharded_blocks(tensors, world.mesh, world.stage_group, world.device)
        for name, target in targets.items():
            try:
                getattr(optimizer, "check_block", lambda *shapes: None)(target.shape, blocks.shape(target))
            except OptimizerSettingError as error:
                raise SpecError(f"{name!r}: {error}") from error
    split = [name for name, target in targets.items() if _is_split(target)]
    check_sight(optimizer, split=split, stages=world.pipelined)


def _is_split(parameter: Tensor) -> bool:
    meta = metadata(parameter)
    return meta is not None and any(meta.mesh.size(axis) > 1 for axis in meta.placement.split_axes)
