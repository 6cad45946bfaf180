"""The split master weight: float32 in a bfloat16 plane and an int16 plane, to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.adam import reference
from meshfold.kernels.adam.checks import check_flat
from meshfold.kernels.adam.interface import AdamKernels

_reference: AdamKernels = reference


@torch.no_grad()
def split_master(x: Tensor) -> tuple[Tensor, Tensor]:
    """``n -> n, n``: float32 in two planes of 2 bytes an element.

    With ``u`` the bits of an element, ``hi = (u + 0x8000) >> 16``, its bfloat16 rounded half up, and
    ``lo = u - (hi << 16)`` as int16. :func:`join_master` inverts it to the bit for every finite number and infinity; a
    NaN becomes the quiet NaN of its sign. Half up, and not to even: at ties, two masters would share one pair.

    Args:
        x: flat, contiguous, float32.

    Returns:
        ``hi`` (bfloat16) and ``lo`` (int16).

    Raises:
        TypeError: for another dtype.
        ValueError: if ``x`` is not flat and contiguous.
    """
    check_flat("x", x, (torch.float32,))
    hi, lo = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
    dispatch.twin("adam", _reference, x).split_master(x.detach(), hi, lo)
    return hi, lo


@torch.no_grad()
def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """``n, n -> n``: the float32 of two planes; the inverse of :func:`split_master`.

    Raises:
        TypeError: unless ``hi`` is bfloat16 and ``lo`` int16.
        ValueError: unless both are flat, contiguous, of one length and on one device.
    """
    check_flat("hi", hi, (torch.bfloat16,))
    check_flat("lo", lo, (torch.int16,), hi)
    x = torch.empty_like(hi, dtype=torch.float32)
    dispatch.twin("adam", _reference, x).join_master(hi.detach(), lo.detach(), x)
    return x
