"""Second moments as a row and a column of means, shared by Adafactor and CAME (Shazeer and Stern 2018, arXiv 1804.04235)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_to_means", "inverse_root", "limit_rms", "zero_means"]


def zero_means(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row means and column means of the last two dims: zeros."""
    shape = tuple(parameter.shape)
    return parameter.new_zeros(shape[:-1]), parameter.new_zeros(shape[:-2] + shape[-1:])


def add_to_means(rows: Tensor, columns: Tensor, squares: Tensor, rate: float) -> None:
    """Let running means take squares in: ``mean ← rate · mean + (1 − rate) · squares``, in place."""
    rows.mul_(rate).add_(squares.mean(dim=-1), alpha=1 - rate)
    columns.mul_(rate).add_(squares.mean(dim=-2), alpha=1 - rate)


def inverse_root(rows: Tensor, columns: Tensor) -> Tensor:
    """Return 1 / √V of the matrix V that row and column means stand for: rows · columns / mean of rows."""
    of_rows = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return torch.mul(of_rows, columns.unsqueeze(-2).rsqrt())


def rms(tensor: Tensor) -> Tensor:
    """Return the root mean square of all elements: a tensor, so that nothing waits for the device."""
    found: Tensor = torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5
    return found


def limit_rms(update: Tensor, largest: float) -> None:
    """Scale an update in place to a root mean square of at most ``largest``."""
    update.div_((rms(update) / largest).clamp_(min=1.0))
