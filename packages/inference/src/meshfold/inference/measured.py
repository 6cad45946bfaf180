"""Choices that are measured on a GPU first: programs for a single row, for the weights that a model has."""

from __future__ import annotations

import warnings

import torch

from meshfold.inference.row_kernels import RowKernels
from meshfold.kernels import measured_row_tiles, take_row_tiles
from meshfold.mesh import Group
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.processes import running_world


def choose_row_programs(kernels: RowKernels, dtype: torch.dtype, group: Group | None, device: torch.device) -> None:
    """Choose the fastest programs for products of one row; those by shape stay where they cannot be measured.

    Args:
        kernels: of a model.
        dtype: of the row.
        group: ranks that share the model, and all call this: they take the programs of the first, since what each of them
            computes must be rounded alike. None: there are no others.
        device: of this rank.
    """
    world = running_world()
    if (1 if world is None else world.size) != (1 if group is None else group.size):
        return  # ranks share the model in another way
    tiles, reason = {}, ""
    try:
        with torch.no_grad():
            calls = [
                call for call in kernels.calls() if call.layer.weight.device.type == device.type
            ]  # others are away
            tiles = measured_row_tiles(calls, dtype)
    except Exception as problem:  # of Triton's compiler, or no memory
        reason = (str(problem) or type(problem).__name__).strip().split("\n")[0]
        warnings.warn(f"programs for a single row were not measured, which may be slower: {reason}", stacklevel=2)
    if group is not None:
        listed = None if reason else [list(tile) for tile in tiles.values()]
        each = all_gather_object(listed, group, device)
        if None in each:
            return
        tiles = {kind: type(tile)(*chosen) for (kind, tile), chosen in zip(tiles.items(), each[0], strict=True)}
    take_row_tiles(tiles)
