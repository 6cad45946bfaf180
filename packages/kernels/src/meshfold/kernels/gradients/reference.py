"""The pass over a gradient in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels.gradients.interface import LANES, LARGEST, SQUARES


def touched(n: int, block: int, start: int) -> int:
    """How many global blocks a shard of ``n`` elements touches."""
    return -(-(start + n) // block) - start // block if n else 0


def partials(x: Tensor, norm: int, block: int, start: int) -> Tensor:
    """``n -> blocks``, float64."""
    blocks = touched(x.numel(), block, start)
    before = start % block
    after = blocks * block - before - x.numel() if blocks else 0
    rows = F.pad(x, (before, after) if blocks else (0, 0)).view(blocks, block // LANES, LANES)
    lanes = torch.zeros(blocks, LANES, dtype=torch.float64, device=x.device)
    for row in range(block // LANES):
        part = rows[:, row].double().abs()
        if norm == LARGEST:
            lanes = torch.maximum(lanes, part)
        else:
            lanes = lanes + (part * part if norm == SQUARES else part)
    while lanes.shape[1] > 1:
        first, second = lanes.chunk(2, dim=1)
        lanes = torch.maximum(first, second) if norm == LARGEST else first + second
    return lanes.view(blocks)


def write(source: Tensor, out: Tensor, add: bool) -> None:
    """Writes or adds to ``out``."""
    if add:
        out.add_(source)
    else:
        out.copy_(source)
