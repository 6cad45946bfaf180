"""Logits in chunks of tokens, and the gradients that are added up from them: the loops of linear + cross entropy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.kernels import dispatch
from meshfold.kernels.cross_entropy import LossKernels, Terms, loss_per_row
from meshfold.kernels.inputs import compute_dtype, contiguous_like

Reduction = Literal["mean", "sum", "none"]

CHUNK_BYTES = 448 << 20
"""Largest size of a chunk of logits, as far as it holds 128 rows."""

LARGE_CHUNK_BYTES = 512 << 20
"""The same where there would be more than eight chunks."""

_ROWS = 256  # rows of the largest tiles that cuBLAS takes for dx = dlogits @ W


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The words that a rank has of a vocabulary that is split over ranks.

    The gradient of ``x`` is then the rank's part of a sum over these ranks.

    Attributes:
        start: number of the rank's first word.
        valid: number of its rows of the weight that are words, the rest being padding.
        size: words in the whole vocabulary.
        all_reduce_max, all_reduce_sum: over the ranks, of float32 tensors (float64); may work in place.
    """

    start: int
    valid: int
    size: int
    all_reduce_max: Callable[[Tensor], Tensor]
    all_reduce_sum: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ChunkSettings:
    """Settings of one loss: the work on each chunk, and when gradients are computed.

    Attributes:
        terms: the words and the loss.
        kernels: that compute it.
        reduction: of the losses.
        chunk: rows at a time.
        grad_enabled: gradients may be needed; torch does not show this inside an autograd function.
        shard: the words of this rank; None: all.
        recompute: gradients are computed in the backward, from logits that are made again.
        entropy: find the entropy of each row too.
        accumulate: dtype in which gradients of the weight are added up; None: its own.
    """

    terms: Terms
    kernels: LossKernels
    reduction: Reduction
    chunk: int
    grad_enabled: bool = True
    shard: VocabularyShard | None = None
    recompute: bool = False
    entropy: bool = False
    accumulate: torch.dtype | None = None


def chunk_rows(rows: int, words: int, item_bytes: int) -> int:
    """Return the number of rows in a chunk: few enough that their logits fit, in whole tiles of a GPU, and in equal chunks."""
    row_bytes = max(words * item_bytes, 1)
    # Each chunk reads and writes the weight's gradient once, so if there would be many, larger chunks are worth their memory.
    limit = CHUNK_BYTES if rows * row_bytes <= 8 * CHUNK_BYTES else LARGE_CHUNK_BYTES
    fit = max(limit // row_bytes, 128)
    unit = _ROWS if fit >= 4 * _ROWS else 128
    fit = fit // unit * unit
    count = -(-rows // fit)
    even = -(-rows // max(count, 1))
    return min(fit, max(-(-even // unit) * unit, unit))


class LogitChunks:
    """Chunks of rows in order, each with its logits."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: ChunkSettings
    ) -> None:
        self._rows, self._labels = rows, labels
        self._words, more = weight.shape[0], -weight.shape[0] % product_alignment(weight)
        self._weight = F.pad(weight, (0, 0, 0, more)) if more else weight
        self._bias = F.pad(bias, (0, more)) if more and bias is not None else bias
        self._settings, self._terms = settings, settings.terms
        self._kernels = settings.kernels
        self._at = slice(0, 0)
        words, aligned = self._weight.shape[0], 16
        # Align rows to 16 elements: fast matmuls need 16 bytes, and Triton specialises on strides divisible by 16.
        padded = words if torch.compiler.is_compiling() else -(-words // aligned) * aligned
        largest = min(settings.chunk, rows.shape[0])
        self._buffer = torch.empty(largest, padded, dtype=rows.dtype, device=rows.device)[:, :words]
        self._logits = self._padded = self._buffer

    def __iter__(self) -> Iterator[slice]:
        """Yield the place of each chunk among the rows, once its logits are computed."""
        count, size = self._rows.shape[0], self._settings.chunk
        places = range(0, count, size)
        # The first chunk writes the weight's gradient; those that add to it are alike, so a count on meta tensors may take a few.
        for first in itertools.chain(places[:1], dispatch.parts_to_run(places[1:], self._rows)):
            self._at = slice(first, min(first + size, count))
            rows = self._rows[self._at]
            self._padded = self._buffer[: rows.shape[0]]
            if self._bias is None:
                torch.mm(rows, self._weight.t(), out=self._padded)
            else:
                torch.addmm(self._bias, rows, self._weight.t(), out=self._padded)
            self._logits = self._padded[:, : self._words]
            yield self._at

    def losses(self, statistics: Tensor) -> Tensor:
        """Return the loss of each row, ``m``, and write its maximum, sum of exponentials and entropy, ``(2 or 3) m``."""
        entropy, shard = self._settings.entropy, self._settings.shard
        row_max, sums = self._kernels.sum_rows(
            self._logits, None, self._labels[self._at], self._terms, self._terms.smooths, entropy
        )
        if shard is not None:
            largest = shard.all_reduce_max(row_max.clone())
            # A rank without words has a maximum of -inf and sums of 0.
            step = (row_max - largest).masked_fill_(row_max == float("-inf"), 0.0)
            if entropy:
                sums[-1] += step * sums[0]
                sums[-1] *= step.exp()
            sums[0] *= step.exp()
            row_max, sums = largest, shard.all_reduce_sum(sums)
        statistics[0], statistics[1] = row_max, sums[0]
        if entropy:
            statistics[2] = sums[0].log() - sums[-1] / sums[0]
        terms = self._terms
        return loss_per_row(row_max, sums, terms.label_smoothing, terms.z_loss, terms.vocab_size)

    def write_gradient(self, statistics: Tensor, share: Tensor, towards: Tensor | None = None) -> None:
        """Overwrite the logits with their gradient, given the gradients of the rows' losses and entropies."""
        self._kernels.gradient(
            self._logits,
            statistics[0],
            statistics[1],
            self._labels[self._at],
            share,
            self._terms,
            self._logits,
            None if towards is None else statistics[2],
            towards,
        )

    def write_losses_and_gradient(self, share: Tensor) -> Tensor:
        """Return the loss of each row, and overwrite the logits with the gradient of ``(share * loss).sum()``."""
        return self._kernels.write_losses_and_gradient(self._logits, self._labels[self._at], share, self._terms)

    def operands(self) -> ChunkOperands:
        """Return the operands of this chunk's gradients, after the logits' gradient was written."""
        return ChunkOperands(self._rows[self._at], self._logits, self._padded, self._weight)


class ChunkOperands(NamedTuple):
    """Operands of a chunk's gradients.

    Attributes:
        rows: ``m k``.
        dlogits: gradient of the logits, ``m v``.
        padded: the same followed by columns of 0, ``m p``.
        weight: followed by rows of 0, ``p k``.
    """

    rows: Tensor
    dlogits: Tensor
    padded: Tensor
    weight: Tensor


def product_alignment(weight: Tensor) -> int:
    """Return the multiple of words at which cuBLAS takes its fast products; 1: it does not matter.

    An odd vocabulary in a dtype of two bytes runs at a quarter of the speed, for any strides: GPT-2's 50,257 words on an H100 take
    11.6 ms in two products instead of 3. Rows of 0 after the weight cost one copy of it, and those after its gradient nothing.
    """
    fast = dispatch.on_gpu(weight) and weight.element_size() == 2 and not torch.compiler.is_compiling()
    return 8 if fast else 1


class HeadGradients:
    """Gradients of rows, weight and bias, added up chunk by chunk; None for what needs none."""

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: tuple[bool, bool, bool],
        settings: ChunkSettings,
    ) -> None:
        self._weight, self._bias = weight, bias
        self._rows_grad = contiguous_like(rows) if needed[0] else None
        self._weight_grad: Tensor | None = None
        self._bias_grad: Tensor | None = None
        self._first = True
        if needed[1]:
            dtype, make = settings.accumulate or weight.dtype, torch.empty if len(rows) else torch.zeros
            words = weight.shape[0] + -weight.shape[0] % product_alignment(weight)
            self._weight_grad = make(words, weight.shape[1], dtype=dtype, device=weight.device)
        if bias is not None and needed[2]:
            self._bias_grad = torch.zeros(bias.shape, dtype=compute_dtype(bias), device=bias.device)

    def add(self, at: slice, chunk: ChunkOperands) -> None:
        """Add a chunk's part."""
        rows, dlogits = chunk.rows, chunk.dlogits
        if self._rows_grad is not None:
            torch.mm(chunk.padded, chunk.weight, out=self._rows_grad[at])
        if self._weight_grad is not None:
            _add_product(self._weight_grad, chunk.padded.t(), rows, self._first)
        if self._bias_grad is not None:
            self._bias_grad += dlogits.sum(0, dtype=self._bias_grad.dtype)
        self._first = False

    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of rows, weight and bias."""
        words = self._weight.shape[0]  # without rows of 0 behind them
        weight = None if self._weight_grad is None else self._weight_grad[:words].to(self._weight.dtype)
        bias = None if self._bias_grad is None or self._bias is None else self._bias_grad.to(self._bias.dtype)
        return self._rows_grad, weight, bias


def _add_product(out: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Write ``left @ right`` to ``out`` if it is the first product, else add it; ``out`` may have a wider dtype."""
    if out.dtype == left.dtype and first:
        torch.mm(left, right, out=out)
    elif out.dtype == left.dtype:
        out.addmm_(left, right)
    elif out.is_cuda:
        torch.addmm(out, left, right, out.dtype, beta=0 if first else 1, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=0 if first else 1, out=out)
