"""Norms of sharded gradients, which count every element of the global model once.

A rank's shard has elements that no other rank of its chunk's group has. Over the other axes of the mesh the parameter may be
replicated: then several ranks hold each element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from meshfold.kernels import largest_magnitude, sum_of_magnitudes, sum_of_squares
from meshfold.mesh import Group, Mesh, ParameterMeta, all_reduce
from meshfold.mesh.parameters import gradient_shards, max_over_ranks

_KERNELS = {1.0: sum_of_magnitudes, 2.0: sum_of_squares, math.inf: largest_magnitude}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def holders_of(meta: ParameterMeta, shape: torch.Size, mesh: Mesh) -> int | Tensor:
    """Return the number of ranks that hold each element of a shard: one number, or one per element of the flat parameter."""
    apart = mesh.size(*meta.sum_axes)
    counts = [
        (piece, holders // apart) for piece, holders in gradient_shards(torch.empty(shape, device="meta"), meta, mesh)
    ]
    if len({holders for _, holders in counts}) == 1:
        return counts[0][1]
    by_element = torch.empty(shape)
    for piece, holders in gradient_shards(by_element, meta, mesh):
        piece.fill_(holders // apart)
    return by_element.reshape(-1)


def power_sum(gradient: Tensor, holders: int | Tensor, norm_type: float) -> Tensor:
    """Return the sum of ``|g|^p / holders``, or the largest ``|g|`` for infinity: float64, on the gradient's device.

    The 1-, 2- and largest norms of float32, bfloat16 and float16 have the same bits for every placement of the gradient.
    """
    kernel = _KERNELS.get(norm_type)
    if kernel is not None and isinstance(holders, int) and gradient.dtype in _FLOATS:
        parts = kernel(gradient)
        if math.isinf(norm_type):
            return parts.max() if parts.numel() else parts.new_zeros(())
        return parts.sum() / holders
    wide = gradient.double()
    if math.isinf(norm_type):
        return wide.abs().max() if wide.numel() else wide.new_zeros(())
    powers = wide.abs().pow(norm_type) / (holders.to(wide) if isinstance(holders, Tensor) else holders)
    return powers.sum()


def combine(sums: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of one rank's power sums, or the largest for infinity."""
    gathered = [one.to(device) for one in sums]
    if not gathered:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(gathered)
    return stacked.max() if math.isinf(norm_type) else stacked.sum()


def total_norm(sums: Iterable[Tensor], norm_type: float, everyone: Group, device: torch.device) -> Tensor:
    """Return the norm from all ranks' sums: float64, the same on every rank."""
    total = combine(sums, norm_type, device)
    if math.isinf(norm_type):
        return max_over_ranks(total, everyone)
    return all_reduce(total, everyone) ** (1.0 / norm_type)
