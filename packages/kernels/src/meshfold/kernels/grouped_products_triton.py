"""Products of long runs of rows with the matrices of their experts, in Triton for Hopper GPUs.

A program computes tiles of the result in the order of experts, so that matrices are read from the L2 cache. There are as many
programs as multiprocessors. The tensor memory accelerator copies operands and results. A run's last tile also has rows of the next
expert; the results of those are not stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshfold.kernels import grouped_products as plain
from meshfold.kernels._triton import cdiv, launch, programs

_HIGH, _WIDE, _DEEP = 128, 256, 64
"""rows and columns of a tile, and the elements of a row that are multiplied at a time"""
_LISTED = 32  # tiles that are listed at a time
_LEAST = 128
"""mean number of rows of a run from which on this is faster than torch's grouped matmul"""


@triton.jit(do_not_specialize=["room"])
def _list_tiles(ends, tiles, experts, room, HIGH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """List the tiles of rows, by experts: the first row, the expert and the number of rows of each; then how many there are.

    A program lists the tiles of an expert: ``tiles [3 * room + 1]``.
    """
    expert = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    end = tl.load(ends + each, mask=each < experts, other=0)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < experts), other=0)
    many = (end - begin + HIGH - 1) // HIGH
    first = tl.sum(tl.where(each < expert, many, 0))
    mine = tl.sum(tl.where(each == expert, many, 0))
    row = tl.sum(tl.where(each == expert, begin, 0))
    stop = tl.sum(tl.where(each == expert, end, 0))
    for low in range(0, mine, BLOCK):
        number = low + tl.arange(0, BLOCK)
        here = number < mine
        at = tiles + first + number
        tl.store(at, row + number * HIGH, mask=here)
        tl.store(at + room, tl.zeros_like(number) + expert, mask=here)
        tl.store(at + 2 * room, tl.minimum(stop - row - number * HIGH, HIGH), mask=here)
    if expert == experts - 1:
        tl.store(tiles + 3 * room, first + mine)


@triton.jit(do_not_specialize=["room"])
def _rows_times(
    rows,
    matrices,
    y,
    whole,
    tiles,
    room,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TURNED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
):
    """Multiply runs of rows by matrices: ``[m, INNER], [e, INNER, COLUMNS] -> [m, COLUMNS]``; TURNED: ``[e, COLUMNS, INNER]``.

    ``whole`` is y too, for tiles of HIGH rows.
    """
    ACROSS: tl.constexpr = (COLUMNS + WIDE - 1) // WIDE
    # One loop over tiles and steps, so that the first operands of a tile are read during the last steps of the one before it.
    for work in tl.range(tl.program_id(0), tl.load(tiles + 3 * room) * ACROSS, PROGRAMS, flatten=True):
        tile = tiles + work // ACROSS
        column = work % ACROSS * WIDE
        row = tl.load(tile)
        expert = tl.load(tile + room)
        high = tl.load(tile + 2 * room)
        total = tl.zeros((HIGH, WIDE), tl.float32)
        for step in range(INNER // DEEP):
            left = rows.load([row, step * DEEP])
            if TURNED:
                right = matrices.load([expert * COLUMNS + column, step * DEEP]).T
            else:
                right = matrices.load([expert * INNER + step * DEEP, column])
            total = tl.dot(left, right, total)
        if high == HIGH:
            # In two parts, which need half of the shared memory; it has no room for more than three steps beside them.
            left_part, right_part = tl.split(tl.permute(tl.reshape(total, (HIGH, 2, WIDE // 2)), (0, 2, 1)))
            whole.store([row, column], left_part.to(y.dtype.element_ty))
            whole.store([row, column + WIDE // 2], right_part.to(y.dtype.element_ty))
        else:
            up = tl.arange(0, HIGH)
            across = column + tl.arange(0, WIDE)
            at = y + (row + up).to(tl.int64)[:, None] * COLUMNS + across[None, :]
            tl.store(at, total.to(y.dtype.element_ty), mask=(up < high)[:, None] & (across < COLUMNS)[None, :])


def product(left: Tensor, right: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    if right.dim() == 3:
        turned = right.stride(1) < right.stride(2)
        matrices = right.transpose(1, 2) if turned else right
        if _is_long(left, ends) and _is_dense(left, matrices) and not right.shape[1] % _DEEP and not right.shape[2] % 8:
            return _times(left, matrices, ends, turned)
    return plain.product(left, right, ends, counts)


def _is_long(rows: Tensor, ends: Tensor) -> bool:
    """Return True if runs of these rows are long on average, and the device has what the kernel is made for."""
    return rows.shape[0] >= _LEAST * ends.shape[0] and _has_wgmma(rows)


def _has_wgmma(x: Tensor) -> bool:
    if x.is_cuda:
        return torch.cuda.get_device_capability(x.device)[0] == 9
    return x.dtype is torch.float16  # all that Triton's interpreter multiplies


def _is_dense(*operands: Tensor) -> bool:
    """Return True if the tensor memory accelerator reads these as they are."""
    dtype = operands[0].dtype
    return all(each.is_contiguous() and each.data_ptr() % 16 == 0 and each.dtype is dtype for each in operands)


def _times(rows: Tensor, matrices: Tensor, ends: Tensor, turned: bool) -> Tensor:
    """Return the products of rows; ``turned``: matrices are [e, b, a]."""
    experts, columns, inner = matrices.shape if turned else (matrices.shape[0], matrices.shape[2], matrices.shape[1])
    y = rows.new_empty(rows.shape[0], columns)
    room = cdiv(rows.shape[0], _HIGH) + experts
    tiles = ends.new_empty(3 * room + 1)
    launch(
        _list_tiles,
        (experts,),
        ends,
        ends,
        tiles,
        experts,
        room,
        HIGH=_HIGH,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK=_LISTED,
        num_warps=4,
    )
    across = cdiv(columns, _WIDE)
    count = programs(room * across, rows, per_multiprocessor=1)
    launch(
        _rows_times,
        (count,),
        rows,
        TensorDescriptor.from_tensor(rows, [_HIGH, _DEEP]),
        TensorDescriptor.from_tensor(matrices.flatten(0, 1), [_WIDE, _DEEP] if turned else [_DEEP, _WIDE]),
        y,
        TensorDescriptor.from_tensor(y, [_HIGH, _WIDE // 2]),
        tiles,
        room,
        COLUMNS=columns,
        INNER=inner,
        TURNED=turned,
        PROGRAMS=count,
        HIGH=_HIGH,
        WIDE=_WIDE,
        DEEP=_DEEP,
        num_warps=8,
        num_stages=3,
    )
    return y
