"""Copies of blocks that lie apart in memory, in the widest elements that fit.

A copy between different strides moves an element at a time. Of two bytes each that is 1.4 TB/s on an H200, whose memory has 4.8;
runs of features are whole multiples of 16 bytes, and moved as such they go at 3.4 to 4.2 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

WIDE = torch.complex128
"""the widest element there is; it is only moved"""


def wide_contiguous(x: Tensor) -> Tensor:
    """Return ``x.contiguous()``, copied in wide elements where it can be."""
    if x.is_contiguous() or not _is_wide(x):
        return x.contiguous()
    return x.view(WIDE).contiguous().view(x.dtype)


def wide_reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x.reshape(shape)``: a view where it can be one, else copied in wide elements."""
    if not _is_wide(x):
        return x.reshape(shape)
    try:
        return x.view(shape)
    except RuntimeError:  # torch's only way of saying that the elements do not lie so
        return wide_contiguous(x).view(shape)


def _is_wide(x: Tensor) -> bool:
    """Tell whether all runs of features begin and end at multiples of 16 bytes, in real memory, with no gradient wanted."""
    if not x.dim() or torch.compiler.is_compiling() or type(x) not in (Tensor, Parameter):
        return False
    if x.device.type not in ("cpu", "cuda") or (x.requires_grad and torch.is_grad_enabled()):
        return False
    if x.is_complex() or x.stride(-1) != 1 or x.data_ptr() % WIDE.itemsize:
        return False
    each = WIDE.itemsize // x.element_size()
    return all(step % each == 0 for step in (x.storage_offset(), x.shape[-1], *x.stride()[:-1]))
