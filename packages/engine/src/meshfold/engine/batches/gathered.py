"""Tensors of all data coordinates on each of them, whatever their sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.engine.world.world import World
from meshfold.mesh import all_gather


def gather_list(value: Tensor, world: World) -> list[Tensor]:
    """Every data coordinate's tensor, whose dims may differ in size, in their order."""
    over = world.row_group
    if over.size == 1:
        return [value]
    shape = torch.tensor(value.shape, dtype=torch.int64, device=world.device)
    shapes = all_gather(shape.view(1, -1), over, 0)
    most = shapes.max(0).values.tolist()
    padded = torch.zeros(most, dtype=value.dtype, device=world.device)
    padded[tuple(slice(size) for size in value.shape)] = value.detach().to(world.device)
    found = all_gather(padded.unsqueeze(0), over, 0)
    return [
        one[tuple(slice(size) for size in sizes)] for one, sizes in zip(found, shapes.tolist(), strict=True)
    ]
