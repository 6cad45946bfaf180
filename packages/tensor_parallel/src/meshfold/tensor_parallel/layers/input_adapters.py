"""Adapters from the input of a linear layer to its matmul's: unchanged, some of its rows, flattened, or unfolded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from meshfold.mesh.collectives import Primitive
from meshfold.tensor_parallel.layers.base import to_autocast_dtype

InputAdapter = Callable[[Tensor], tuple[Tensor, torch.Size | None]]
"""From a layer's input to its matmul's, with the dims before the last that the output gets; None: those of the matmul."""


def fold(x: Tensor, times: int) -> Tensor:
    """Give a gathered input the shape of the output it leads to: ``(f b) s k -> b s (f k)``."""
    b, inner, k = x.shape[0] // times, x.shape[1:-1], x.shape[-1]
    return x.view(times, b, *inner, k).movedim(0, -2).reshape(b, *inner, times * k)


def unfold(x: Tensor, times: int) -> Tensor:
    """Invert :func:`fold`: ``b s (f k) -> (f b) s k``."""
    b, inner, k = x.shape[0], x.shape[1:-1], x.shape[-1] // times
    return x.view(b, *inner, times, k).movedim(-2, 0).reshape(times * b, *inner, k)


def as_given(x: Tensor) -> tuple[Tensor, None]:
    """Pass the input of a layer to its matmul unchanged."""
    return to_autocast_dtype(x), None


def rows_taken(take_rows: Primitive, x: Tensor) -> tuple[Tensor, None]:
    """Adapt the input of a layer whose matmul reads only this rank's rows of it."""
    return to_autocast_dtype(take_rows(x)), None


def flattened(x: Tensor) -> tuple[Tensor, None]:
    """Adapt the input of a layer whose output is flat, ``m n``: this rank's tokens need not be whole sequences."""
    x = to_autocast_dtype(x)
    return x.reshape(-1, x.shape[-1]), None


def unfolded(times: int) -> InputAdapter:
    """Return the adapter of a layer whose input was gathered and folded before it."""
    return as_given if times == 1 else partial(_unfolded, times)


def _unfolded(times: int, x: Tensor) -> tuple[Tensor, None]:
    return unfold(to_autocast_dtype(x), times), None
