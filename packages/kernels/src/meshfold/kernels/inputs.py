"""Inputs of kernels: checks, conversion to rows, and the compute dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


def is_autocast(x: Tensor) -> bool:
    """Return True if torch.autocast is on for a tensor's device."""
    if not torch._C._is_any_autocast_enabled():  # asked of every norm
        return False
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a kernel computes in: float64 for float64, else float32, rounded once at the output.

    Raises:
        TypeError: for a tensor that is not floating point.
    """
    if x.dtype is torch.float64:
        return torch.float64
    if not x.dtype.is_floating_point:
        raise TypeError(f"kernels take floating-point tensors; this one is {x.dtype}: convert it first")
    return torch.float32


def as_rows(x: Tensor) -> Tensor:
    """``... c -> (...) c`` with neighbouring columns side by side in memory: a view where that is possible."""
    if x.ndim == 0:
        raise ValueError("kernels work on rows; a tensor without dims has none: give it at least one dim")
    rows = (
        x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)
    )  # each one call: models ask very often
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


def result_of_shape(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return what a Function has made, in the shape of its input, for it to return; nothing else may hold ``y``.

    It is no view: autograd forbids in-place changes of one that a Function returns, and ``y = norm(x); y *= 2`` must work as
    behind torch's own norm.
    """
    found = y.reshape(shape)
    if torch.compiler.is_compiling() or not found._is_view():
        return found
    unviewed: Tensor = torch.ops.aten._unsafe_view(found, found.shape)
    return unviewed


def contiguous_like(x: Tensor) -> Tensor:
    """Return memory for a result of the same shape, dtype and device, contiguous.

    ``empty_like``, not ``empty``: layout tracking, as in tensor parallelism, then gives the result the layout of ``x``. It cannot
    track the writes of a Triton kernel.
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check_vector(name: str, vector: Tensor | None, size: int) -> None:
    """Raise ValueError unless ``vector`` is None or has shape ``[size]``."""
    if vector is not None and vector.shape != (size,):
        raise ValueError(
            f"{name} has shape {list(vector.shape)}, but the rows are {size} elements wide: give it shape [{size}]"
        )


def check_alike(name: str, x: Tensor, y: Tensor) -> None:
    """Raise ValueError unless both have the same shape."""
    if x.shape != y.shape:
        raise ValueError(f"{name} must have equal shapes, got {list(x.shape)} and {list(y.shape)}")


def check_flat(
    name: str, x: Tensor, dtypes: Sequence[torch.dtype], like: Tensor | None = None, size: int | None = None
) -> None:
    """Raise unless ``x`` is flat, contiguous, of one of ``dtypes``, and has the length and the device of ``like``.

    Raises:
        TypeError: for a wrong dtype.
        ValueError: for anything else.
    """
    if x.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {str(x.dtype).removeprefix('torch.')}, it must be {known}: convert it first")
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
