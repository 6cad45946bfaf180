"""Second moments as a row and a column of means, shared by Adafactor and CAME (Shazeer and Stern 2018, arXiv 1804.04235).

Means are of whole tensors. A rank that has a block of a tensor keeps all means, and uses those of its rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.optimizers.blocks import Blocks, SumOver


def zero_means(blocks: Blocks, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row means and column means of the last two dims: zeros."""
    shape = blocks.shape(parameter)
    return parameter.new_zeros(shape[:-1]), parameter.new_zeros(shape[:-2] + shape[-1:])


def running_means(state: dict[str, Any], key: str, blocks: Blocks, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of rows and of columns that a parameter's state keeps under a name, zeros at first; ``like``: its block."""
    if f"{key}_row" not in state:
        state[f"{key}_row"], state[f"{key}_col"] = zero_means(blocks, like)
    return state[f"{key}_row"], state[f"{key}_col"]


def row_and_column(parameter: Tensor, squares: Tensor) -> tuple[SumOver, SumOver]:
    """Return what to ask for: sums over the last dim, and over the one before it."""
    rows, columns = _dims(parameter)
    return SumOver(parameter, squares, rows), SumOver(parameter, squares, columns)


def square_sum(parameter: Tensor, values: Tensor) -> SumOver:
    """Return what to ask for: the sum of squares of all elements, in float32 at least."""
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    return SumOver(parameter, wide.square(), ())


def add_to_means(
    blocks: Blocks, parameter: Tensor, means: tuple[Tensor, Tensor], sums: Sequence[Tensor], rate: float
) -> None:
    """Let running means take sums of :func:`row_and_column` in: ``mean ← rate · mean + (1 − rate) · sum / count``, in place."""
    shape = blocks.shape(parameter)
    for mean, total, count in zip(means, sums, (shape[-1], shape[-2]), strict=True):
        mean.mul_(rate).add_(total / count, alpha=1 - rate)


def add_lists(
    means: Sequence[Tensor],
    sums: Sequence[Tensor],
    counts: Sequence[int],
    rates: Sequence[float],
    *,
    factor: float = 1.0,
    eps: float = 0.0,
) -> None:
    """Let running means take sums in: ``mean ← rate · mean + (1 − rate) · (factor · sum / count + eps)``, in place of both.

    Args:
        means: of rows or of columns, of whole tensors.
        sums: of their shapes.
        counts: of the numbers that each element of a sum is of.
        rates: of each.
        factor: of all sums.
        eps: added to each number that is averaged.
    """
    torch._foreach_mul_(list(sums), [(1 - rate) * factor / count for rate, count in zip(rates, counts, strict=True)])
    torch._foreach_add_(list(sums), [(1 - rate) * eps for rate in rates])
    torch._foreach_mul_(list(means), list(rates))
    torch._foreach_add_(list(means), list(sums))


def take_lists(
    parameters: Sequence[Tensor],
    means: Sequence[Sequence[Tensor]],
    sums: Sequence[Sequence[Tensor]],
    rates: Sequence[float],
    *,
    factor: float = 1.0,
    eps: float = 0.0,
) -> None:
    """Let running means of rows and of columns of whole matrices take sums in; see :func:`add_lists`."""
    for mean, total, dim in zip(means, sums, (-1, -2), strict=True):
        add_lists(mean, total, [p.shape[dim] for p in parameters], rates, factor=factor, eps=eps)


def inverse_root(blocks: Blocks, parameter: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return this block of 1 / √V, where the means represent V = rows · columns / mean of rows."""
    return spread(blocks, parameter, (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_(), columns.rsqrt())


def spread(blocks: Blocks, parameter: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return this block of the outer product of rows and columns."""
    of_rows, of_columns = _dims(parameter)
    return torch.mul(
        blocks.cut(rows, parameter, of_rows).unsqueeze(-1), blocks.cut(columns, parameter, of_columns).unsqueeze(-2)
    )


def rms(blocks: Blocks, parameter: Tensor, squares: Tensor) -> Tensor:
    """Return the root mean square of all elements, of their sum of squares: a tensor, so that nothing waits for the device."""
    return squares.div(math.prod(blocks.shape(parameter))).sqrt()


def rms_of_lists(parameters: Sequence[Tensor]) -> Tensor:
    """Return the root mean square of all elements of each whole tensor, ``(tensors,)``."""
    norms = torch.stack(torch._foreach_norm(list(parameters), 2.0))
    return norms / on_device([p.numel() ** 0.5 for p in parameters], norms)


def on_device(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers as a tensor of the dtype and device of another, without waiting for the device."""
    return torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)


def limit_rms(blocks: Blocks, parameter: Tensor, update: Tensor, squares: Tensor, largest: float) -> None:
    """Scale an update in place to a root mean square of at most ``largest``."""
    update.div_((rms(blocks, parameter, squares) / largest).clamp_(min=1.0))


def _dims(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dims of the row means and of the column means."""
    dims = tuple(range(parameter.dim()))
    return dims[:-1], (*dims[:-2], dims[-1])
