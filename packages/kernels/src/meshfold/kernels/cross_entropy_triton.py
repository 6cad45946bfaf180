"""Cross entropy in Triton: a program walks along one row of logits; the gradient goes block by block.

For the loss of a whole vocabulary with its gradient, one kernel does both. A multiprocessor works on one long row at a time, so the
second pass over a row reads it from the L2 cache: 132 rows of 128,256 words are 34 MB. Device memory then moves each logit twice
(read, written) instead of three times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch, programs
from meshfold.kernels.cross_entropy import Terms

_WIDEST_BLOCK = 4096
_LONG_ROW = 96 << 10  # bytes; two such rows on each of 132 SMs fill half of a 50 MB L2 cache


@triton.jit
def _z(logit, scale, softcap, CAPPED: tl.constexpr):
    """softcap * tanh(scale * logit / softcap), or scale * logit."""
    logit *= scale
    if CAPPED:
        decay = tl.exp(-2.0 * tl.abs(logit) / softcap)
        bounded = softcap * (1.0 - decay) / (1.0 + decay)
        logit = tl.where(logit < 0.0, -bounded, bounded)
    return logit


@triton.jit(do_not_specialize=["start", "valid", "scale", "softcap"])
def _sums(
    logits,
    row_max,
    labels,
    sums,
    rows,
    start,
    valid,
    stride,
    scale,
    softcap,
    MAX_GIVEN: tl.constexpr,
    ONLY_MAX: tl.constexpr,
    LOGIT_SUM: tl.constexpr,
    ENTROPY: tl.constexpr,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row: its maximum, the sum of exponentials relative to it (rescaled whenever it grows), the target, the sum of logits."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    column = tl.arange(0, COLUMNS)
    if MAX_GIVEN:
        largest = tl.load(row_max + row)
    else:
        largest = tl.full((), float("-inf"), tl.float32)
    sum_exp = tl.zeros((), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    below = tl.zeros((), dtype=tl.float32)  # sum of exp(z - largest) * (z - largest)
    for first in range(0, valid, COLUMNS):
        mask = first + column < valid
        value = tl.load(base + first + column, mask=mask, other=float("-inf")).to(tl.float32)
        value = tl.where(mask, _z(value, scale, softcap, CAPPED), float("-inf"))
        if not MAX_GIVEN:
            grown = tl.maximum(largest, tl.max(value, axis=0))
            # While the row has only been -inf, the sum is zero; keep -inf - -inf (NaN) out of it.
            step = tl.where(largest == float("-inf"), 0.0, largest - grown)
            if ENTROPY:
                below = (below + step * sum_exp) * tl.exp(step)
            sum_exp *= tl.exp(step)
            largest = grown
        if not ONLY_MAX:
            about = tl.where(largest == float("-inf"), 0.0, largest)
            exponential = tl.exp(value - about)
            sum_exp += tl.sum(exponential, axis=0)
            if ENTROPY:
                below += tl.sum(tl.where(exponential > 0.0, exponential * (value - about), 0.0), axis=0)
            if LOGIT_SUM:
                total += tl.sum(tl.where(mask, value, 0.0), axis=0)
    if not MAX_GIVEN:
        tl.store(row_max + row, largest)
    if not ONLY_MAX:
        place = tl.load(labels + row).to(tl.int64) - start
        here = (place >= 0) & (place < valid)
        target = tl.load(base + place, mask=here, other=0.0).to(tl.float32)
        target = _z(target, scale, softcap, CAPPED)
        tl.store(sums + row, sum_exp)
        tl.store(sums + rows + row, target)
        if LOGIT_SUM:
            tl.store(sums + 2 * rows + row, total)
        if ENTROPY:
            tl.store(sums + (3 if LOGIT_SUM else 2) * rows + row, below)


@triton.jit(do_not_specialize=["start", "valid", "smoothing", "spread", "z_loss", "scale", "softcap"])
def _gradient(
    logits,
    row_max,
    sum_exp,
    labels,
    grad,
    entropy,
    entropy_grad,
    out,
    columns,
    start,
    valid,
    stride,
    out_stride,
    smoothing,
    spread,
    z_loss,
    scale,
    softcap,
    ENTROPY: tl.constexpr,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word = column < valid
    value = tl.load(logits + row * stride + column, mask=word, other=float("-inf")).to(tl.float32)
    z = tl.where(word, _z(value, scale, softcap, CAPPED), float("-inf"))
    weight = tl.load(grad + row).to(tl.float32)
    largest = tl.load(row_max + row)
    total = tl.load(sum_exp + row)
    lse = largest + tl.log(total)
    factor = weight * (1.0 + 2.0 * z_loss * lse)
    place = tl.load(labels + row).to(tl.int64) - start
    if ENTROPY:
        towards = tl.load(entropy_grad + row)
        probability = tl.exp(z - largest) / total
        value = probability * (factor - towards * tl.load(entropy + row))
        value -= tl.where(probability > 0.0, towards * probability * (z - lse), 0.0)
    else:
        value = tl.exp(z - largest) * (factor / total)
    value -= weight * spread + tl.where(column == place, weight * (1.0 - smoothing), 0.0)
    if CAPPED:
        value *= 1.0 - (z / softcap) * (z / softcap)
    value = tl.where(word, value * scale, 0.0)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["smoothing", "spread", "z_loss", "scale", "softcap"])
def _losses_and_gradient(
    logits,
    labels,
    share,
    losses,
    rows,
    columns,
    stride,
    smoothing,
    spread,
    z_loss,
    scale,
    softcap,
    SMOOTHS: tl.constexpr,
    CAPPED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows of a whole vocabulary: the loss, then the gradient, which overwrites the logits.

    Each lane (a vector of 16 bytes) has its own maximum and sum, so there is no dependency along the row. Reads and writes go
    up to the stride: its padding makes every access a whole vector.
    """
    lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    base = logits + tl.program_id(0).to(tl.int64) * stride
    step = tl.num_programs(0).to(tl.int64) * stride
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        # Must be read before this row is overwritten; the reductions below synchronise all threads.
        place = tl.load(labels + row).to(tl.int64)
        target = tl.load(base + place, mask=(place >= 0) & (place < columns), other=0.0).to(tl.float32)
        target = _z(target, scale, softcap, CAPPED)
        highest = tl.full((LANES,), float("-inf"), tl.float32)
        partial = tl.zeros((LANES,), dtype=tl.float32)
        total = tl.zeros((LANES,), dtype=tl.float32)
        for first in range(0, columns, LANES * VECTOR):
            word = first + lane < columns
            held = first + lane < stride
            z = tl.load(base + first + lane, mask=held, other=0.0, eviction_policy="evict_last")
            z = tl.where(word, _z(z.to(tl.float32), scale, softcap, CAPPED), float("-inf"))
            grown = tl.maximum(highest, tl.max(z, axis=1))
            about = tl.where(grown == float("-inf"), 0.0, grown)
            partial = partial * tl.exp(highest - about) + tl.sum(tl.exp(z - about[:, None]), axis=1)
            highest = grown
            if SMOOTHS:
                total += tl.sum(tl.where(word, z, 0.0), axis=1)
        largest = tl.max(highest, axis=0)
        about = tl.where(largest == float("-inf"), 0.0, largest)
        sum_exp = tl.sum(partial * tl.exp(highest - about), axis=0)
        lse = about + tl.log(sum_exp)
        loss = lse - target
        if SMOOTHS:
            loss = (1.0 - smoothing) * loss + smoothing * (lse - tl.sum(total, axis=0) / columns)
        tl.store(losses + row, loss + z_loss * lse * lse)
        weight = tl.load(share + row).to(tl.float32)
        factor = weight * (1.0 + 2.0 * z_loss * lse) / sum_exp
        for first in range(0, columns, LANES * VECTOR):
            column = first + lane
            held = column < stride
            z = tl.load(base + column, mask=held, other=0.0, eviction_policy="evict_first")
            z = _z(z.to(tl.float32), scale, softcap, CAPPED)
            value = tl.exp(z - about) * factor
            value -= weight * spread + tl.where(column == place, weight * (1.0 - smoothing), 0.0)
            if CAPPED:
                value *= 1.0 - (z / softcap) * (z / softcap)
            tl.store(base + column, (value * scale).to(logits.dtype.element_ty), mask=held)
        base += step


@triton.jit
def _multiply(x, factor, elements, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        for _ in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
            value = tl.load(x + index, mask=index < elements).to(tl.float32)
            tl.store(x + index, (value * by).to(x.dtype.element_ty), mask=index < elements)
            index += tl.num_programs(0).to(tl.int64) * BLOCK


def max_of_rows(logits: Tensor, valid: int) -> Tensor:
    row_max = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    terms = Terms(start=0, valid=valid, vocab_size=0)
    _run_sums(logits, row_max, row_max, row_max, terms, only_max=True)
    return row_max


def sum_rows(
    logits: Tensor,
    row_max: Tensor | None,
    labels: Tensor,
    terms: Terms,
    logit_sum: bool = False,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    given = row_max is not None
    if row_max is None:
        row_max = torch.empty(rows, dtype=torch.float32, device=logits.device)
    out = torch.empty((2 + logit_sum + entropy, rows), dtype=torch.float32, device=logits.device)
    _run_sums(logits, row_max, labels.contiguous(), out, terms, given=given, logit_sum=logit_sum, entropy=entropy)
    return row_max, out


def _run_sums(
    logits: Tensor,
    row_max: Tensor,
    labels: Tensor,
    out: Tensor,
    terms: Terms,
    given: bool = False,
    only_max: bool = False,
    logit_sum: bool = False,
    entropy: bool = False,
) -> None:
    wide = min(_WIDEST_BLOCK, max(128, triton.next_power_of_2(logits.shape[1])))
    launch(
        _sums,
        (logits.shape[0],),
        logits,
        logits,
        row_max,
        labels,
        out,
        logits.shape[0],
        terms.start,
        terms.valid,
        logits.stride(0),
        terms.scale,
        terms.softcap,
        MAX_GIVEN=given,
        ONLY_MAX=only_max,
        LOGIT_SUM=logit_sum,
        ENTROPY=entropy,
        CAPPED=terms.softcap != 0.0,
        COLUMNS=wide,
        num_warps=8 if wide > 1024 else 4,
    )


def gradient(
    logits: Tensor,
    row_max: Tensor,
    sum_exp: Tensor,
    labels: Tensor,
    grad: Tensor,
    terms: Terms,
    out: Tensor,
    entropy: Tensor | None = None,
    entropy_grad: Tensor | None = None,
) -> None:
    rows, columns = logits.shape
    wide = min(2048, max(128, triton.next_power_of_2(columns)))
    row_max = row_max.contiguous()
    launch(
        _gradient,
        (rows, cdiv(columns, wide)),
        logits,
        logits,
        row_max,
        sum_exp.contiguous(),
        labels.contiguous(),
        grad.contiguous(),
        row_max if entropy is None else entropy.contiguous(),
        row_max if entropy_grad is None else entropy_grad.contiguous(),
        out,
        columns,
        terms.start,
        terms.valid,
        logits.stride(0),
        out.stride(0),
        terms.label_smoothing,
        _spread(terms),
        terms.z_loss,
        terms.scale,
        terms.softcap,
        ENTROPY=entropy is not None,
        CAPPED=terms.softcap != 0.0,
        COLUMNS=wide,
        num_warps=4,
    )


def write_losses_and_gradient(logits: Tensor, labels: Tensor, share: Tensor, terms: Terms) -> Tensor:
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    vector, row_bytes = 16 // logits.element_size(), columns * logits.element_size()
    lanes = min(2048, max(128, triton.next_power_of_2(cdiv(columns, vector))))
    launch(
        _losses_and_gradient,
        (programs(rows, logits, 1 if row_bytes > _LONG_ROW else 2),),
        logits,
        logits,
        labels.contiguous(),
        share.contiguous(),
        losses,
        rows,
        columns,
        logits.stride(0),
        terms.label_smoothing,
        _spread(terms),
        terms.z_loss,
        terms.scale,
        terms.softcap,
        SMOOTHS=terms.smooths,
        CAPPED=terms.softcap != 0.0,
        LANES=lanes,
        VECTOR=vector,
        num_warps=max(4, lanes // 64),
    )
    return losses


def _spread(terms: Terms) -> float:
    """Return the probability that label smoothing gives to each word."""
    return terms.label_smoothing / terms.vocab_size if terms.label_smoothing else 0.0


def multiply_(x: Tensor, factor: Tensor) -> None:
    launch(
        _multiply,
        (programs(cdiv(x.numel(), 4096), x, 8),),
        x,
        x,
        factor,
        x.numel(),
        BLOCK=4096,
        num_warps=8,
    )
