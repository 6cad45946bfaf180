"""Choices that are measured on a GPU first: programs for a single row, and kernels of a token that begin early."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from meshfold.kernels import measured_row_tiles, overlaps_on, take_row_tiles
from meshfold.mesh import Group
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.processes import running_world
from meshfold.tensor_parallel.few_rows.fused_sums import FusedSums
from meshfold.tensor_parallel.few_rows.row_kernels import RowKernels


def choose_row_programs(kernels: RowKernels, dtype: torch.dtype, group: Group | None, device: torch.device) -> None:
    """Choose the fastest programs for products of one row; those by shape stay where they cannot be measured.

    Args:
        kernels: of a model.
        dtype: of the row.
        group: ranks that share the model, and all call this: they take the programs of the first, since what each of them
            computes must be rounded alike. None: there are no others.
        device: of this rank.
    """
    if not _has_all_ranks(group, kernels.ranks):
        return  # they share the model in another way
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


def agreement(
    kernels: RowKernels | None, sums: FusedSums | None, rows: int, device: torch.device
) -> Callable[[bool], bool] | None:
    """Return what tells whether all ranks say yes; None where kernels of a token are not tried that begin early.

    Args:
        kernels, sums: of a model, for few rows.
        rows: of the token's batch.
        device: of this rank.
    """
    fused = sums is not None and rows <= sums.rows
    group = sums.group if sums is not None and fused else None
    if not overlaps_on(device) or not (fused or (kernels is not None and rows == 1)):
        return None
    known = next((one.ranks for one in (kernels, sums) if one is not None), None)
    if not _has_all_ranks(group, known):
        return None
    return bool if group is None else lambda yes: all(all_gather_object(yes, group, device))


def _has_all_ranks(group: Group | None, known: int | None) -> bool:
    """Return True if a group has all ranks of a model; ``known``: how many, by default those of the job."""
    world = running_world()
    job = 1 if world is None else world.size
    return (job if known is None else known) == (1 if group is None else group.size)
