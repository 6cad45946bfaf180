"""Errors for tensors that a flat kernel cannot take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


def check_flat(
    name: str, x: Tensor, dtypes: Sequence[torch.dtype], like: Tensor | None = None, size: int | None = None
) -> None:
    """Raise unless ``x`` is flat, contiguous, of one of ``dtypes``, and as long as and on the device of ``like``.

    Raises:
        TypeError: for a wrong dtype.
        ValueError: for anything else.
    """
    if x.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(
            f"{name} is {str(x.dtype).removeprefix('torch.')}, it must be {known}: convert it first"
        )
    if x.ndim != 1 or not x.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {list(x.stride())}; it must be flat and contiguous: "
            "give it as .view(-1), or as a slice of a flat buffer"
        )
    if like is None:
        return
    wanted = like.numel() if size is None else size
    if x.numel() != wanted:
        raise ValueError(f"{name} has {x.numel()} elements where {wanted} belong: cut it to the same shard")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, the others on {like.device}: move it there")


def check_start(start: int) -> None:
    """Raise ValueError for a negative offset."""
    if start < 0:
        raise ValueError(f"start is {start}; it is the global number of the shard's first element, 0 or more")
