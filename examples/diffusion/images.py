"""Images that the examples draw themselves, and grids of images as PNG files."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

CLASSES = ("disc", "square", "ring", "stripes")


def draw(rows: int, size: int, step: int) -> tuple[Tensor, Tensor]:
    """Return images ``rows 3 size size`` from -1 to 1, and their classes ``rows``: the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    kinds = torch.randint(len(CLASSES), (rows,), generator=generator)
    colour = torch.rand(rows, 3, 1, 1, generator=generator) * 0.5 + 0.5
    centre = torch.rand(rows, 2, 1, 1, generator=generator) - 0.5
    radius = 0.3 + 0.3 * torch.rand(rows, 1, 1, generator=generator)
    line = torch.linspace(-1, 1, size)
    y, x = line[:, None] - centre[:, 0], line[None, :] - centre[:, 1]
    far = (x.square() + y.square()).sqrt()
    shapes = (
        far < radius,
        torch.maximum(x.abs(), y.abs()) < radius,
        (far - radius).abs() < 0.12,
        (4 * (x + y)).sin() > 0,
    )
    masks = torch.stack(shapes, 1)[torch.arange(rows), kinds]
    return torch.where(masks[:, None], 2 * colour - 1, -torch.ones(())), kinds


def save_grid(images: Tensor, path: Path, columns: int = 4) -> None:
    """Write images ``rows 3 height width`` from -1 to 1 as one PNG."""
    rows = [torch.cat([*row], 2) for row in images.split(columns) if len(row) == columns]
    grid = torch.cat(rows, 1).float().clamp(-1, 1).add(1).mul(127.5).byte()
    Image.fromarray(grid.permute(1, 2, 0).cpu().numpy()).save(path)
