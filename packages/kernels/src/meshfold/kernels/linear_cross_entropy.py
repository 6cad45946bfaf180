"""Linear layer and softmax cross entropy in one, for logits that are never held whole.

With W the head's weight, s a scale and c a soft cap, the logits of a row x are z = c * tanh(s * (W x + b) / c), or s * (W x + b)
without a cap; the loss of z and its gradient are those of :mod:`meshfold.kernels.cross_entropy`. Tokens come in chunks. For each::

    logits  = rows @ W.T                 one chunk of them, in the dtype of the rows
    loss   += cross_entropy(logits)
    dlogits = d loss / d logits          in the place of the logits
    dx      = dlogits @ W,   dW += dlogits.T @ rows

A loss that is one number has its gradients computed in the forward, up to the factor that the backward brings: three matmuls,
and one chunk of logits is all that is ever held. Where each row's factor is known only in the backward (``reduction="none"``), or
where gradients would have to wait long (``recompute=True``), the forward keeps two numbers a row and the backward makes the
chunk's logits again: four matmuls. Float16 is always computed so, because a loss scale must be in dlogits before they are rounded.

Sources: Hsu et al., "Liger Kernel", 2024 (chunks, gradients in the forward); Bello et al., "Neural Combinatorial Optimization",
2016, and Gemma 2 (soft caps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.cross_entropy import gradient, loss_per_row, sum_rows
from meshfold.kernels.inputs import compute_dtype, is_autocast

Reduction = Literal["mean", "sum", "none"]

CHUNK_BYTES = 384 << 20
"""Largest size of a chunk of logits, as far as it holds 128 rows."""

_ROWS = 1024  # a multiple of this many rows fills a GPU's multiprocessors with the tiles of dx = dlogits @ W


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
class _Settings:
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    scale: float
    reduction: Reduction
    chunk: int
    vocabulary: VocabularyShard | None
    recompute: bool

    @property
    def changes(self) -> bool:
        """Tell whether logits are scaled or capped."""
        return self.scale != 1.0 or self.softcap != 0.0


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    scale: float = 1.0,
    reduction: Reduction = "mean",
    chunk: int | None = None,
    vocabulary: VocabularyShard | None = None,
    recompute: bool = False,
) -> Tensor:
    """Return the cross entropy of the logits ``x @ weight.T + bias``: ``... k, v k, ... -> scalar`` (or ``...``).

    Args:
        x: rows of k elements.
        weight: the head's, in the dtype of ``x``.
        labels: word numbers in [0, v), int64, or ``ignore_index``; for a split vocabulary, of the whole.
        bias: v.
        ignore_index: label of rows whose loss and gradient are 0.
        label_smoothing: share of the target that is spread evenly over the words.
        z_loss: weight of lse**2.
        softcap: bound of the logits, ``softcap * tanh(logits / softcap)``; 0 for none.
        scale: factor of the logits, before the cap.
        reduction: ``"mean"`` over the rows that count (0 where none does), ``"sum"``, or ``"none"``.
        chunk: rows at a time; None: as many as fit :data:`CHUNK_BYTES`.
        vocabulary: the words of ``weight`` where it is split over ranks; all of them must call.
        recompute: compute gradients in the backward, from the logits made again.

    Returns:
        float32; float64 for float64.

    Raises:
        ValueError: if shapes or dtypes do not fit, or, on the CPU, for a label that is no word.
    """
    _check(x, weight, labels, bias, reduction, ignore_index, vocabulary)
    if is_autocast(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows, flat = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    settings = _Settings(
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, scale=scale,
        reduction=reduction, chunk=chunk or chunk_rows(rows.shape[0], weight.shape[0], rows.element_size()),
        vocabulary=vocabulary, recompute=recompute or reduction == "none" or rows.dtype == torch.float16,
    )  # fmt: skip
    found: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, flat, settings)
    return found.view(labels.shape) if reduction == "none" else found


def chunk_rows(rows: int, words: int, item_bytes: int) -> int:
    """Return the number of rows in a chunk: so few that their logits fit, in whole tiles of a GPU, and chunks alike."""
    fit = max(CHUNK_BYTES // max(words * item_bytes, 1), 128)
    unit = _ROWS if fit >= _ROWS else 128
    fit = fit // unit * unit
    count = -(-rows // fit)
    even = -(-rows // max(count, 1))
    return min(fit, max(-(-even // unit) * unit, unit))


def _check(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    reduction: str,
    ignore_index: int,
    vocabulary: VocabularyShard | None,
) -> None:
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must have as many columns as the weight: ... k and v k; got {list(x.shape)} and {list(weight.shape)}"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels must have one number a row, shape {list(x.shape[:-1])}; got {list(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], one number a word; got {list(bias.shape)}")
    if x.dtype != weight.dtype and not is_autocast(x):
        raise ValueError(
            f"x is {x.dtype} and weight {weight.dtype}: give one dtype, as in x.to(weight.dtype)"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: use 'mean' or 'sum' over the rows that count, or 'none'")
    words = weight.shape[0] if vocabulary is None else vocabulary.size
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = (labels != ignore_index) & ((labels < 0) | (labels >= words))
        if wrong.any():
            raise ValueError(
                f"label {int(labels[wrong][0])} is no word of {words}: labels are 0 to {words - 1}, or "
                f"ignore_index={ignore_index} for a row that does not count"
            )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> Tensor:
        ctx.settings = settings
        counts = labels != settings.ignore_index
        share = counts.to(compute_dtype(rows))  # of each row in the sum
        if settings.reduction == "mean":
            share = share / share.sum().clamp(min=1)
        wanted = any(ctx.needs_input_grad[:3])
        now = wanted and not settings.recompute
        gradients = _Gradients(rows, weight, bias, ctx.needs_input_grad[:3]) if now else None
        chunks = _Chunks(rows, weight, bias, labels, settings)
        losses = torch.empty_like(share)
        statistics = torch.empty(2, *share.shape, dtype=share.dtype, device=share.device)
        for at in chunks:
            row_max, sums = chunks.sums()
            losses[at] = loss_per_row(
                row_max, sums, settings.label_smoothing, settings.z_loss, chunks.vocabulary_size
            )
            if gradients is not None:
                gradients.add(at, chunks.gradient(row_max, sums[0], share[at]))
            elif wanted:
                statistics[0, at], statistics[1, at] = row_max, sums[0]
        if gradients is not None:
            ctx.save_for_backward(*gradients.found())
        elif wanted:
            ctx.save_for_backward(rows, weight, bias, labels, statistics, share)
        losses = losses.masked_fill(~counts, 0.0)
        return losses if settings.reduction == "none" else (losses * share).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.settings.recompute:
            # Their only use: a second backward is refused by autograd, which has let go of them.
            scaled = (None if saved is None else saved.mul_(grad) for saved in ctx.saved_tensors)
            return *scaled, None, None
        rows, weight, bias, labels, (row_max, sum_exp), share = ctx.saved_tensors
        share = share * grad
        gradients = _Gradients(rows, weight, bias, ctx.needs_input_grad[:3])
        chunks = _Chunks(rows, weight, bias, labels, ctx.settings)
        for at in chunks:
            gradients.add(at, chunks.gradient(row_max[at], sum_exp[at], share[at]))
        return *gradients.found(), None, None


class _Chunks:
    """Chunks of rows, one after the other, each with its logits."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> None:
        self._rows, self._weight, self._bias, self._labels = rows, weight, bias, labels
        self._settings = settings
        shard = settings.vocabulary
        self._start = 0 if shard is None else shard.start
        self._valid = weight.shape[0] if shard is None else shard.valid
        self.vocabulary_size = weight.shape[0] if shard is None else shard.size
        self._sum, self._differentiate = dispatch.twin(sum_rows, rows), dispatch.twin(gradient, rows)
        self._at = slice(0, 0)
        largest = min(settings.chunk, rows.shape[0])
        self._buffer = torch.empty(largest, weight.shape[0], dtype=rows.dtype, device=rows.device)
        self._logits = self._buffer
        self._tanh: Tensor | None = None

    def __iter__(self) -> Iterator[slice]:
        """Yield the place of each chunk among the rows, when its logits are there."""
        count, size = self._rows.shape[0], self._settings.chunk
        for first in range(0, count, size):
            self._at = slice(first, min(first + size, count))
            self._compute()
            yield self._at

    def _compute(self) -> None:
        rows, settings = self._rows[self._at], self._settings
        logits = self._logits = self._buffer[: rows.shape[0]]
        if self._bias is None:
            torch.mm(rows, self._weight.t(), out=logits)
        else:
            torch.addmm(self._bias, rows, self._weight.t(), out=logits)
        if settings.softcap:
            self._tanh = logits.mul_(settings.scale / settings.softcap).tanh_().clone()
            logits.mul_(settings.softcap)
        elif settings.scale != 1.0:
            logits.mul_(settings.scale)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the maximum of each row of this chunk and its sums, over the whole vocabulary: ``m, (2 or 3) m``."""
        settings, shard = self._settings, self._settings.vocabulary
        labels, smooth = self._labels[self._at], settings.label_smoothing != 0.0
        row_max, sums = self._sum(self._logits, None, labels, self._start, self._valid, smooth)
        if shard is None:
            return row_max, sums
        # One pass over the logits: sums about the rank's own maximum are rescaled to that of all.
        largest = shard.all_reduce_max(row_max.clone())
        sums[0] *= (row_max - largest).exp()
        return largest, shard.all_reduce_sum(sums)

    def gradient(self, row_max: Tensor, sum_exp: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Return this chunk's rows and, in the place of their logits, the gradient of what the head made of them."""
        settings, logits = self._settings, self._logits
        self._differentiate(
            logits, row_max, sum_exp, self._labels[self._at], self._start, self._valid, share,
            settings.label_smoothing, settings.z_loss, self.vocabulary_size, logits,
        )  # fmt: skip
        if self._tanh is not None:
            logits.mul_(self._tanh.square_().neg_().add_(1.0))
        if settings.scale != 1.0:
            logits.mul_(settings.scale)
        return self._rows[self._at], logits


class _Gradients:
    """Gradients of rows, weight and bias, added up chunk by chunk; None for what needs none."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, bool, bool]
    ) -> None:
        self._weight = weight
        self._rows_grad = torch.empty_like(rows, memory_format=torch.contiguous_format) if needed[0] else None
        self._weight_grad = torch.empty_like(weight) if needed[1] else None
        self._bias_grad = (
            torch.zeros(bias.shape, dtype=compute_dtype(bias), device=bias.device)
            if bias is not None and needed[2]
            else None
        )
        self._bias_dtype = None if bias is None else bias.dtype
        self._first = True
        if rows.shape[0] == 0 and self._weight_grad is not None:
            self._weight_grad.zero_()

    def add(self, at: slice, chunk: tuple[Tensor, Tensor]) -> None:
        """Add a chunk's part, given its rows and the gradient of its logits."""
        rows, dlogits = chunk
        if self._rows_grad is not None:
            torch.mm(dlogits, self._weight, out=self._rows_grad[at])
        if self._weight_grad is not None and self._first:
            torch.mm(dlogits.t(), rows, out=self._weight_grad)
        elif self._weight_grad is not None:
            self._weight_grad.addmm_(dlogits.t(), rows)
        if self._bias_grad is not None:
            self._bias_grad += dlogits.sum(0, dtype=self._bias_grad.dtype)
        self._first = False

    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of rows, weight and bias."""
        bias = None if self._bias_grad is None else self._bias_grad.to(self._bias_dtype)
        return self._rows_grad, self._weight_grad, bias
