"""Copies between different strides, in the widest elements that both tensors allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

# A copy between different strides moves one element at a time: 1.4 of 4.8 TB/s on an H200 for 2-byte elements. Rows of
# features are multiples of 16 bytes; moved as 16-byte elements they reach 3.4 to 4.2 TB/s.
WIDE = torch.complex128
"""The widest element type; values are moved in it, never computed with."""

LEAST = 1 << 20
"""Bytes of the smallest tensor that is moved in wide elements: the copy of a smaller one takes less time than the views."""


def has_memory(x: Tensor) -> bool:
    """Return True for a tensor or a parameter of any class; not for other subclasses, such as fake tensors and DTensors.

    torch lets ``isinstance`` take those for parameters, too.
    """
    kind = type(x)
    return kind is Tensor or issubclass(kind, Parameter)


def wide_contiguous(x: Tensor) -> Tensor:
    """Return ``x.contiguous()``, copied in wide elements where possible."""
    if x.is_contiguous() or not _is_wide(x):
        return x.contiguous()
    return x.view(WIDE).contiguous().view(x.dtype)


def wide_reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x.reshape(shape)``: a view where it can be one, else copied in wide elements."""
    if not _is_wide(x):
        return x.reshape(shape)
    try:
        return x.view(shape)
    except RuntimeError:  # torch raises if the strides do not allow the view
        return wide_contiguous(x).view(shape)


def _is_wide(x: Tensor) -> bool:
    """Return True if all rows of features are aligned to 16 bytes in real memory, and no gradient is needed."""
    if torch.compiler.is_compiling() or x.nbytes < LEAST or not x.dim() or not has_memory(x):
        return False
    if x.device.type not in ("cpu", "cuda") or (x.requires_grad and torch.is_grad_enabled()):
        return False
    if x.is_complex() or x.stride(-1) != 1 or x.data_ptr() % WIDE.itemsize:
        return False
    each = WIDE.itemsize // x.element_size()
    return all(step % each == 0 for step in (x.storage_offset(), x.shape[-1], *x.stride()[:-1]))
