"""The pass over a gradient: partial norms from one read of the memory, and casts.

A partial norm belongs to a block of 64 Ki elements of the *global* flat gradient and is a float64. Inside a block the order of
additions is fixed: element ``j`` is added to lane ``j % 1024``, lanes from first to last, and then the lanes are added in halves,
lane ``i`` to lane ``i + 512``, then ``i + 256``, and so on. The square of a float32 is exact in float64. So the reference, numba
and Triton give the same bits, and so does every sharding at multiples of the block, on any number of ranks. If the blocks' numbers
are added in global order, the norm is the same on all ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.inputs import GRADIENTS, check_flat, check_start

SQUARES, MAGNITUDES, LARGEST = 2, 1, 0  # kinds of partial norms
LANES = 1024  # elements that are accumulated side by side
_WRITTEN = (*GRADIENTS, torch.float64)


def sum_of_squares(x: Tensor, block: int = 65536, start: int = 0) -> Tensor:
    """``n -> blocks``: the sum of squares of each block, float64.

    Args:
        x: flat, contiguous, float32, bfloat16 or float16.
        block: elements a block, a multiple of 1024.
        start: global number of the first element of ``x``; blocks begin at multiples of ``block`` from 0.

    Returns:
        One number for each block that ``x`` touches. Not finite exactly where an element of the block is not.

    Raises:
        TypeError: for another dtype.
        ValueError: if ``x`` is not flat and contiguous, ``start`` negative, or ``block`` not a multiple of 1024.
    """
    return _partials(x, SQUARES, block, start)


def sum_of_magnitudes(x: Tensor, block: int = 65536, start: int = 0) -> Tensor:
    """``n -> blocks``: the sum of magnitudes of each block, float64, for the 1-norm; as :func:`sum_of_squares`."""
    return _partials(x, MAGNITUDES, block, start)


def largest_magnitude(x: Tensor, block: int = 65536, start: int = 0) -> Tensor:
    """``n -> blocks``: the largest magnitude of each block, float64, for the infinity norm; NaN where there is one."""
    return _partials(x, LARGEST, block, start)


@torch.no_grad()
def write_gradient(source: Tensor, out: Tensor, *, add: bool = False) -> None:
    """``n -> n``: write ``source`` to ``out`` in its dtype, or add it.

    Added in the wider dtype of the two, float32 at least, and rounded once. For a change of dtype on a GPU, where torch's copy
    reaches half of the memory's rate.

    Args:
        source: flat, contiguous, float32, bfloat16, float16 or float64.
        out: of the same length and on the same device, of any of these dtypes.
        add: add to ``out`` instead of writing it.

    Raises:
        TypeError: for another dtype.
        ValueError: if a tensor is not flat and contiguous, or lengths or devices differ.
    """
    check_flat("source", source, _WRITTEN)
    check_flat("out", out, _WRITTEN, source)
    same = source.dtype is out.dtype and not add  # plain copy
    wider = out if out.dtype is torch.float64 else source
    run = write if same else dispatch.twin(write, wider)
    run(source.detach(), out.detach(), add)


@torch.no_grad()
def _partials(x: Tensor, norm: int, block: int, start: int) -> Tensor:
    check_flat("x", x, GRADIENTS)
    _check_blocks(block, start)
    return dispatch.twin(partials, x)(x.detach(), norm, block, start)


def _check_blocks(block: int, start: int) -> None:
    check_start(start)
    if block <= 0 or block % LANES:
        raise ValueError(f"block is {block}; it must be a multiple of {LANES} elements, which are added at once")


# The reference in plain torch: it defines every result and the signatures of the Triton and numba versions.


def touched(n: int, block: int, start: int) -> int:
    """Return the number of global blocks that a shard of ``n`` elements touches."""
    return -(-(start + n) // block) - start // block if n else 0


def partials(x: Tensor, norm: int, block: int, start: int) -> Tensor:
    """``n -> blocks`` float64: the partial norm of each global block of ``block`` elements that x touches."""
    blocks = touched(x.numel(), block, start)
    before = start % block
    after = blocks * block - before - x.numel() if blocks else 0
    rows = F.pad(x, (before, after) if blocks else (0, 0)).view(blocks, block // LANES, LANES)
    lanes = torch.zeros(blocks, LANES, dtype=torch.float64, device=x.device)
    for row in range(block // LANES):
        part = rows[:, row].double().abs()
        if norm == LARGEST:
            lanes = torch.maximum(lanes, part)
        else:
            lanes = lanes + (part * part if norm == SQUARES else part)
    while lanes.shape[1] > 1:
        first, second = lanes.chunk(2, dim=1)
        lanes = torch.maximum(first, second) if norm == LARGEST else first + second
    return lanes.view(blocks)


def write(source: Tensor, out: Tensor, add: bool) -> None:
    """Write ``source`` in the dtype of ``out``, or add it: in float32 at least, rounded once."""
    if add:
        out.add_(source)
    else:
        out.copy_(source)
