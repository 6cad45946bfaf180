"""Moments in 8 bits: block-wise dynamic quantisation (Dettmers et al. 2022, arXiv 2110.02861).

Blocks of 256 numbers share a scale, their largest magnitude. A code is the nearest of 256 numbers from −1 or 0 to 1. Their
distances grow with their size: seven powers of ten, each divided evenly, with twice as many steps as the one below. A positive
number never becomes 0 without a sign, since it divides.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
"""Numbers that share a scale."""
_POWERS = 7


@functools.cache
def codes(*, signed: bool) -> tuple[float, ...]:
    """Return the values of the 256 codes, ascending: the paper's dynamic data type."""
    found = [0.0, 1.0]
    for power in range(_POWERS):
        count = 1 << (power if signed else power + 1)
        middles = [0.1 + 0.9 * (place + 0.5) / count for place in range(count)]
        for middle in middles:
            value = middle * 10.0 ** (power + 1 - _POWERS)
            found += [value, -value] if signed else [value]
    return tuple(sorted(found))


@functools.cache
def _table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers, and the borders between them, on a device."""
    values = torch.tensor(codes(signed=signed), dtype=torch.float64)
    return values.to(device, torch.float32), ((values[1:] + values[:-1]) / 2).to(device, torch.float32)


def pack(values: Tensor, *, signed: bool) -> Tensor:
    """Return numbers as bytes, flat: a code for each, padded to whole blocks, then the float32 scales of the blocks.

    Args:
        values: of any shape, float32 or float64.
        signed: some are below 0.
    """
    _, borders = _table(signed, values.device)
    flat = values.reshape(-1)
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) if blocks.numel() else blocks.new_zeros(0, 1)
    shares = (blocks / scales.masked_fill(scales == 0, 1.0)).to(torch.float32)
    found = torch.bucketize(shares, borders, out_int32=True)
    if not signed:
        found = torch.where((shares > 0) & (found == 0), 1, found)
    return torch.cat([found.to(torch.uint8).view(-1), scales.to(torch.float32).view(torch.uint8).view(-1)])


def unpack(packed: Tensor, like: Tensor, *, signed: bool) -> Tensor:
    """Return the numbers of :func:`pack`, in the shape and dtype of another tensor.

    Args:
        packed: bytes, also as floats: a state that torch has loaded has its parameter's dtype, where bytes stay exact.
        like: of the shape, and float32 or float64.
        signed: as they were packed.
    """
    count = -(-like.numel() // BLOCK)
    found, scales = packed.to(torch.uint8).split([count * BLOCK, count * 4])
    numbers, _ = _table(signed, packed.device)
    values = numbers[found.to(torch.int32)].view(count, BLOCK).to(like.dtype)
    values *= scales.clone().view(torch.float32).unsqueeze(1)
    flat: Tensor = values.view(-1)[: like.numel()]
    return flat.view(like.shape)
