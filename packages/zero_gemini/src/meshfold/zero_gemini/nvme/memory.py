"""Memory that direct I/O can use: tensors that begin on a page, and the bytes of any tensor without a copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshfold.zero_gemini.errors import DiskError

Bytes = npt.NDArray[np.uint8]

ALIGN = 4096
"""Bytes. Direct I/O wants offsets, lengths and addresses in multiples of the device's block: 512 or 4096."""


def round_up(nbytes: int) -> int:
    """The next multiple of `ALIGN`, in bytes."""
    return -(-nbytes // ALIGN) * ALIGN


def aligned_empty(nbytes: int, *, pin: bool = False) -> Tensor:
    """An uninitialised CPU tensor ``(nbytes,)`` of uint8 that begins on a page, so that direct I/O needs no copy.

    Args:
        nbytes: length in bytes; one page more is allocated. Use ``.view(dtype)`` for another type.
        pin: page-locked, for transfers to and from a GPU.
    """
    if nbytes < 0:
        raise DiskError(f"aligned_empty({nbytes}): a number of bytes cannot be negative.")
    raw = torch.empty(nbytes + ALIGN, dtype=torch.uint8, pin_memory=pin)
    start = -raw.data_ptr() % ALIGN
    return raw[start : start + nbytes]


def bytes_of(tensor: Tensor, what: str) -> Bytes:
    """The bytes of a contiguous CPU tensor, sharing its memory.

    Raises:
        DiskError: the tensor is on another device, is not contiguous, or is lazily conjugated or negated.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise DiskError(
            f"{what}: the tensor must be a dense one on the CPU, but is {tensor.layout} on {tensor.device}."
        )
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise DiskError(
            f"{what}: the tensor {tuple(tensor.shape)} is a view that is not contiguous: pass .contiguous()."
        )
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat
