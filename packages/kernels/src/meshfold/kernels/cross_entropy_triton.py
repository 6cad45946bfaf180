"""Cross entropy in Triton: a program walks along one row of logits; the gradient goes block by block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import launch

_WIDEST_BLOCK = 4096


@triton.jit(do_not_specialize=["start", "valid"])
def _sums(
    logits, row_max, labels, sums, rows, start, valid, stride,
    MAX_GIVEN: tl.constexpr, ONLY_MAX: tl.constexpr, LOGIT_SUM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: its maximum, the sum of exponentials about it (rescaled whenever it grows), target, sum of logits."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    column = tl.arange(0, COLUMNS)
    if MAX_GIVEN:
        largest = tl.load(row_max + row)
    else:
        largest = tl.full((), float("-inf"), tl.float32)
    sum_exp = tl.zeros((), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    for first in range(0, valid, COLUMNS):
        mask = first + column < valid
        value = tl.load(base + first + column, mask=mask, other=float("-inf")).to(tl.float32)
        if not MAX_GIVEN:
            grown = tl.maximum(largest, tl.max(value, axis=0))
            # While the row holds nothing but -inf the sum is zero, and -inf - -inf must not reach it.
            sum_exp *= tl.where(grown == float("-inf"), 1.0, tl.exp(largest - grown))
            largest = grown
        if not ONLY_MAX:
            about = tl.where(largest == float("-inf"), 0.0, largest)
            sum_exp += tl.sum(tl.exp(value - about), axis=0)
            if LOGIT_SUM:
                total += tl.sum(tl.where(mask, value, 0.0), axis=0)
    if not MAX_GIVEN:
        tl.store(row_max + row, largest)
    if not ONLY_MAX:
        place = tl.load(labels + row).to(tl.int64) - start
        here = (place >= 0) & (place < valid)
        target = tl.load(base + place, mask=here, other=0.0).to(tl.float32)
        tl.store(sums + row, sum_exp)
        tl.store(sums + rows + row, target)
        if LOGIT_SUM:
            tl.store(sums + 2 * rows + row, total)


@triton.jit(do_not_specialize=["start", "valid", "smoothing", "spread", "z_loss"])
def _gradient(
    logits, row_max, sum_exp, labels, grad, out, columns, start, valid, stride, out_stride,
    smoothing, spread, z_loss, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word = column < valid
    value = tl.load(logits + row * stride + column, mask=word, other=float("-inf")).to(tl.float32)
    weight = tl.load(grad + row).to(tl.float32)
    largest = tl.load(row_max + row)
    total = tl.load(sum_exp + row)
    scale = weight * (1.0 + 2.0 * z_loss * (largest + tl.log(total))) / total
    place = tl.load(labels + row).to(tl.int64) - start
    value = tl.exp(value - largest) * scale - weight * spread
    value -= tl.where(column == place, weight * (1.0 - smoothing), 0.0)
    value = tl.where(word, value, 0.0)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=column < columns)


def max_of_rows(logits: Tensor, valid: int) -> Tensor:
    row_max = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _run_sums(logits, row_max, row_max, row_max, 0, valid, only_max=True)
    return row_max


def sum_rows(
    logits: Tensor, row_max: Tensor | None, labels: Tensor, start: int, valid: int, logit_sum: bool
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    given = row_max is not None
    if row_max is None:
        row_max = torch.empty(rows, dtype=torch.float32, device=logits.device)
    out = torch.empty((3 if logit_sum else 2, rows), dtype=torch.float32, device=logits.device)
    _run_sums(logits, row_max, labels.contiguous(), out, start, valid, given=given, logit_sum=logit_sum)
    return row_max, out


def _run_sums(
    logits: Tensor,
    row_max: Tensor,
    labels: Tensor,
    out: Tensor,
    start: int,
    valid: int,
    given: bool = False,
    only_max: bool = False,
    logit_sum: bool = False,
) -> None:
    wide = min(_WIDEST_BLOCK, max(128, triton.next_power_of_2(logits.shape[1])))
    launch(
        _sums, (logits.shape[0],), logits,
        logits, row_max, labels, out, logits.shape[0], start, valid, logits.stride(0),
        MAX_GIVEN=given, ONLY_MAX=only_max, LOGIT_SUM=logit_sum, COLUMNS=wide, num_warps=8 if wide > 1024 else 4,
    )  # fmt: skip


def gradient(
    logits: Tensor,
    row_max: Tensor,
    sum_exp: Tensor,
    labels: Tensor,
    start: int,
    valid: int,
    grad: Tensor,
    label_smoothing: float,
    z_loss: float,
    vocab_size: int,
    out: Tensor,
) -> None:
    rows, columns = logits.shape
    wide = min(2048, max(128, triton.next_power_of_2(columns)))
    launch(
        _gradient, (rows, triton.cdiv(columns, wide)), logits,
        logits, row_max.contiguous(), sum_exp.contiguous(), labels.contiguous(), grad.contiguous(), out,
        columns, start, valid, logits.stride(0), out.stride(0),
        label_smoothing, label_smoothing / vocab_size if label_smoothing else 0.0, z_loss, COLUMNS=wide, num_warps=4,
    )  # fmt: skip
