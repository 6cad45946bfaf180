"""Products of runs of rows, each run with the matrix of its expert, in one launch where the device has one.

``torch.nn.functional.grouped_mm`` takes bfloat16, float16 and float32 if rows start at multiples of 16 bytes. Everything else, such
as float64, is a loop over experts. The loop synchronises to read the sizes of the runs, unless the host knows them. Long runs on a
Hopper GPU have a Triton kernel, which is faster than torch's there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshfold.kernels import dispatch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_IN_TRITON = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes


def grouped_product(left: Tensor, right: Tensor, ends: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Multiply the rows of each expert: ``[m, a], [e, a, b] -> [m, b]``, or ``[a, m], [m, b] -> [e, a, b]``.

    The first is a product of rows and matrices, the second the gradient of such matrices. There is no backward: call it without
    gradients.

    Args:
        left: rows sorted by expert, in dim 0 or, transposed, in dim 1.
        right: a matrix for each expert, or rows as in ``left``. A transposed view costs nothing.
        ends: [e] int32: the row after the last of each expert. Rows after ``ends[-1]`` are not read; their results are undefined.
        counts: rows of each expert, if the host knows them; then the loop needs no synchronisation.

    Returns:
        in the dtype of ``left``; matrices of experts without rows are zero.
    """
    # Of meta tensors the loop's products are counted: as one launch where they stand for a GPU.
    in_triton = left.dtype in _IN_TRITON and (not left.is_meta or dispatch.on_gpu(left))
    found = dispatch.piece(product, left, right) if in_triton else product
    return found(left, right, ends, counts)


def grouped_shape(left: Tensor, right: Tensor, ends: Tensor) -> tuple[int, ...]:
    """Return the shape of a :func:`grouped_product`."""
    if right.dim() == 3:
        return left.shape[0], right.shape[2]
    return ends.shape[0], left.shape[0], right.shape[1]


# The reference in plain torch: it defines every result and the signature of the Triton version.


def product(left: Tensor, right: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Return the product of each run, by torch's launch if it takes these."""
    if _fits(left, right):
        return torch.nn.functional.grouped_mm(left, right, offs=ends)
    y = left.new_zeros(grouped_shape(left, right, ends))
    for expert, begin, end in _runs(ends, counts):
        if right.dim() == 3:
            torch.mm(left[begin:end], right[expert], out=y[begin:end])
        else:
            torch.mm(left[:, begin:end], right[begin:end], out=y[expert])
    return y


def _fits(left: Tensor, right: Tensor) -> bool:
    """Return True if torch's grouped_mm takes these. Meta tensors use the loop: FLOP counters know its matmuls."""
    each = left.element_size()
    sizes: tuple[int, ...]
    if right.dim() == 3:
        rows, sizes = left.shape[0], right.shape[1:]
        steps = right.stride(1 if right.stride(1) < right.stride(2) else 2)
    else:
        rows, sizes, steps = right.shape[0], (left.shape[0], right.shape[1]), 1
    return (
        not left.is_meta
        and left.dtype in _DTYPES
        and right.dtype is left.dtype
        and rows > 0
        and steps == 1
        and all(size * each % _ALIGNMENT == 0 for size in sizes)
        and all(t.storage_offset() * each % _ALIGNMENT == 0 for t in (left, right))
    )


def _runs(ends: Tensor, counts: Sequence[int] | None) -> list[tuple[int, int, int]]:
    """Return expert, first row and the row after the last, of experts that have rows."""
    stops: list[int] = []
    if counts is None:
        stops = ends.tolist()
    else:
        for count in counts:
            stops.append((stops[-1] if stops else 0) + count)
    begins = [0, *stops[:-1]]
    return [(e, begin, end) for e, (begin, end) in enumerate(zip(begins, stops, strict=True)) if end > begin]
