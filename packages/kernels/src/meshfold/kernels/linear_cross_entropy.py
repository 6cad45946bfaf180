"""Linear layer and softmax cross entropy in one, for logits that are never held whole.

With W the head's weight, b its bias, s a scale and c a soft cap, the logits of a row x are::

    z = s * (W x + b),  or  c * tanh(s * (W x + b) / c)

The loss of z and its gradient are defined in :mod:`meshfold.kernels.cross_entropy`. Tokens come in chunks. For each::

    logits  = rows @ W.T                        one chunk of them, in the dtype of the rows
    losses  = cross_entropy(logits)             scale and cap are computed here, in float32
    dlogits = share * d losses / d logits       in the place of the logits
    dx      = dlogits @ W,   dW += dlogits.T @ rows

**Gradients in the forward.** For a scalar loss, forward computes the gradients, up to the factor that backward provides. This takes
three matmuls, and at most one chunk of logits is held. The backward multiplies by that factor; on a GPU a kernel reads it there and
stops if it is 1, so that the host waits for nothing.

**Gradients in the backward.** If each row's factor is known only then (``reduction="none"``, :func:`linear_log_probs`), or
gradients would have to wait long (``recompute=True``), forward keeps two or three numbers a row and backward computes the chunk's
logits again. This takes four matmuls. Float16 is always computed so, because a loss scale must be in dlogits before they are
rounded.

**Split vocabulary.** Each chunk takes one all-reduce MAX and one all-reduce SUM of two to four numbers a row, and reads its logits
once: sums relative to the rank's own maximum are rescaled to the maximum of all ranks. A single exchange would have to gather from
all ranks. Two are cheap, because a rank has few of the words and therefore few, large chunks.

Sources: Hsu et al., "Liger Kernel", 2024 (chunks, gradients in the forward); Bello et al., "Neural Combinatorial Optimization",
2016, and Gemma 2 (soft caps).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.kernels.cross_entropy import LossKernels, Terms
from meshfold.kernels.functions import once_differentiable
from meshfold.kernels.inputs import compute_dtype, is_autocast
from meshfold.kernels.logit_chunks import (
    ChunkSettings,
    HeadGradients,
    LogitChunks,
    Reduction,
    VocabularyShard,
    chunk_rows,
)

__all__ = ["Reduction", "VocabularyShard", "gradients_in_backward", "linear_cross_entropy", "linear_log_probs"]

_later = 0  # open contexts


@contextmanager
def gradients_in_backward() -> Iterator[None]:
    """Context manager: losses inside are computed as with ``recompute=True``.

    For code that holds the graphs of several losses at a time, such as a pipeline, where each would hold a gradient of the
    weight.
    """
    global _later
    _later += 1
    try:
        yield
    finally:
        _later -= 1


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
    shift: bool = False,
    row_weights: Tensor | None = None,
    vocabulary: VocabularyShard | None = None,
    recompute: bool = False,
    accumulate: torch.dtype | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the cross entropy of the logits ``x @ weight.T + bias``: ``... k, v k, ... -> scalar`` (or ``...``).

    Under autocast the operands are cast as for ``F.linear``. Packed documents need no more than ``ignore_index`` at their ends. A
    second backward through the same loss, or one of the gradient, is refused.

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
        reduction: ``"mean"`` over the rows whose label counts (0 where none does), ``"sum"``, or ``"none"``.
        shift: the label of a row is the next one, as of a language model: ``labels[..., i + 1]`` for ``x[..., i, :]``. The
            last row of each sequence does not count.
        row_weights: ``...``, factors of the rows' losses, without a gradient. A mean divides by the number of rows still.
        vocabulary: the words of ``weight`` where it is split over ranks; all of them must call.
        recompute: compute gradients in the backward, from the logits made again; also inside of :func:`gradients_in_backward`.
        accumulate: dtype in which the chunks' gradients of the weight are added up; None: its own. float32 rounds a bfloat16
            gradient once, and holds it in twice the memory.
        chunk: rows at a time; None: as many as fit :data:`meshfold.kernels.logit_chunks.CHUNK_BYTES`.

    Returns:
        float32; float64 for float64.

    Raises:
        ValueError: if shapes or dtypes do not fit, or, on the CPU, for a label that is no word. On a GPU such a label makes the
            loss NaN.
        RuntimeError: for a second backward.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: use 'mean' or 'sum' over the rows that count, or 'none'")
    if shift:
        labels = _next(labels, ignore_index)
    operands = _operands(x, weight, bias)
    _check(*operands, labels, row_weights, vocabulary, accumulate, chunk)
    settings = ChunkSettings(
        kernels=LossKernels.of(operands[0]),
        grad_enabled=torch.is_grad_enabled(),
        terms=_terms(operands[1], vocabulary, label_smoothing, z_loss, scale, softcap),
        reduction=reduction,
        chunk=_chunk(chunk, *operands[:2]),
        shard=vocabulary,
        recompute=recompute or _later > 0 or reduction == "none" or operands[0].dtype == torch.float16,
        accumulate=accumulate,
    )
    share = _shares(labels, row_weights, ignore_index, settings.terms.vocab_size, compute_dtype(operands[0]))
    if reduction == "mean":
        share = share / (labels != ignore_index).sum().clamp(min=1)
    rows, weight, bias = operands
    found: Tensor = _LinearCrossEntropy.apply(
        rows.reshape(-1, rows.shape[-1]), weight, bias, labels.reshape(-1), share.reshape(-1), settings
    )[0]
    return found.view(labels.shape) if reduction == "none" else found


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    scale: float = 1.0,
    entropy: bool = False,
    shift: bool = False,
    vocabulary: VocabularyShard | None = None,
    accumulate: torch.dtype | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label, and the entropy of each row: ``... k, v k, ... -> ..., ...``.

    Both are differentiable. Alignment takes them of long sequences, where logits would be the largest tensor by far.

    Args:
        x, weight, labels, bias, ignore_index, softcap, shift, vocabulary, accumulate, chunk: as for :func:`linear_cross_entropy`.
        scale: factor of the logits, before the cap: 1 / temperature.
        entropy: find the entropy of the softmax too, in nats; at the price of one more sum a row.

    Returns:
        float32 (float64): the log-probabilities, 0 where the label does not count; the entropies, also 0 there, or None.

    Raises:
        ValueError, RuntimeError: as :func:`linear_cross_entropy`.
    """
    if shift:
        labels = _next(labels, ignore_index)
    operands = _operands(x, weight, bias)
    _check(*operands, labels, None, vocabulary, accumulate, chunk)
    settings = ChunkSettings(
        kernels=LossKernels.of(operands[0]),
        grad_enabled=torch.is_grad_enabled(),
        terms=_terms(operands[1], vocabulary, 0.0, 0.0, scale, softcap),
        reduction="none",
        chunk=_chunk(chunk, *operands[:2]),
        shard=vocabulary,
        recompute=True,
        entropy=entropy,
        accumulate=accumulate,
    )
    share = _shares(labels, None, ignore_index, settings.terms.vocab_size, compute_dtype(operands[0]))
    rows, weight, bias = operands
    losses, entropies = _LinearCrossEntropy.apply(
        rows.reshape(-1, rows.shape[-1]), weight, bias, labels.reshape(-1), share.reshape(-1), settings
    )
    return -losses.view(labels.shape), None if entropies is None else entropies.view(labels.shape)


_Operands = tuple[Tensor, Tensor, Tensor | None]


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> _Operands:
    """Return the operands, cast as autocast casts them for ``F.linear``: all except float64."""
    if not is_autocast(x):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    cast = [None if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, weight, bias)]
    return (
        x if cast[0] is None else cast[0],
        weight if cast[1] is None else cast[1],
        bias if cast[2] is None else cast[2],
    )


def _next(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the next label of each, along the last dim; ``ignore_index`` for the last one."""
    if labels.ndim == 0:
        raise ValueError("shift=True takes labels of sequences, shape [..., s]; got a single number")
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_weights: Tensor | None,
    vocabulary: VocabularyShard | None,
    accumulate: torch.dtype | None,
    chunk: int | None,
) -> None:
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must have as many columns as the weight: ... k and v k; got {list(x.shape)} and {list(weight.shape)}"
        )
    for name, given in (("labels", labels), ("row_weights", row_weights)):
        if given is not None and given.shape != x.shape[:-1]:
            raise ValueError(f"{name} must have one number a row, shape {list(x.shape[:-1])}; got {list(given.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], one number a word; got {list(bias.shape)}")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and given.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype} and {name} {given.dtype}: give one dtype, as in x.to({name}.dtype)")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64; got {labels.dtype}: use labels.long()")
    if row_weights is not None and row_weights.requires_grad:
        raise ValueError("row_weights get no gradient: detach them, or multiply what reduction='none' returns by them")
    if vocabulary is not None and not 0 <= vocabulary.valid <= weight.shape[0]:
        raise ValueError(f"vocabulary.valid is {vocabulary.valid}, but the weight has {weight.shape[0]} rows")
    if accumulate is not None and accumulate != torch.promote_types(accumulate, weight.dtype):
        raise ValueError(f"accumulate={accumulate} is narrower than the weight's {weight.dtype}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: give the number of rows at a time, 1 or more, or None")


def _chunk(chunk: int | None, x: Tensor, weight: Tensor) -> int:
    return chunk or chunk_rows(x.shape[:-1].numel(), weight.shape[0], x.element_size())


def _terms(
    weight: Tensor,
    shard: VocabularyShard | None,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
) -> Terms:
    words = weight.shape[0]
    return Terms(
        start=0 if shard is None else shard.start,
        valid=words if shard is None else shard.valid,
        vocab_size=words if shard is None else shard.size,
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        scale=float(scale),
        softcap=float(softcap),
    )


def _shares(labels: Tensor, row_weights: Tensor | None, ignore_index: int, words: int, dtype: torch.dtype) -> Tensor:
    """Return each row's factor in the loss: 0 for an ignored row, NaN for a label outside the vocabulary.

    Raises:
        ValueError: on the CPU, for a label outside the vocabulary.
    """
    counts = labels != ignore_index
    wrong = counts & ((labels < 0) | (labels >= words))
    # Reading the values would synchronise with the GPU, and cannot be traced.
    readable = labels.device.type == "cpu" and type(labels) is Tensor and not torch.compiler.is_compiling()
    if readable and wrong.any():
        raise ValueError(
            f"label {int(labels[wrong][0])} is outside the vocabulary of {words}: labels are 0 to {words - 1}, or "
            f"ignore_index={ignore_index} for a row that does not count"
        )
    share = counts.to(dtype)
    if row_weights is not None:
        share = (share * row_weights).to(dtype)
    return share.masked_fill(wrong, float("nan"))


class _LinearCrossEntropy(torch.autograd.Function):
    """``m k, v k, v, m, m`` -> the loss, a number or ``m``, and the entropies ``m`` or None."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        share: Tensor,
        settings: ChunkSettings,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.settings = settings
        needed = ctx.needs_input_grad[:3]  # True even under no_grad
        wanted = any(needed) and settings.grad_enabled
        now = wanted and not settings.recompute
        gradients = HeadGradients(rows, weight, bias, needed, settings) if now else None
        chunks = LogitChunks(rows, weight, bias, labels, settings)
        losses = torch.empty_like(share)
        # Per row: maximum, sum of exponentials, entropy.
        statistics = share.new_empty((2 + settings.entropy, *share.shape))
        for at in chunks:
            if gradients is not None and settings.shard is None:
                losses[at] = chunks.write_losses_and_gradient(share[at])
                gradients.add(at, chunks.operands())
                continue
            losses[at] = chunks.losses(statistics[:, at])
            if gradients is not None:
                chunks.write_gradient(statistics[:, at], share[at])
                gradients.add(at, chunks.operands())
        if gradients is not None:
            ctx.save_for_backward(*gradients.found())
        elif wanted:
            ctx.save_for_backward(rows, weight, bias, labels, statistics, share)
        # An ignored row may have an infinite loss, and 0 times infinity is NaN. Not in place: see as_dtype.
        losses = (losses * share).masked_fill(share == 0.0, 0.0)
        entropies = statistics[2] * share if settings.entropy else None
        return losses if settings.reduction == "none" else losses.sum(), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor | None) -> Any:
        if not torch.compiler.is_compiling():
            if getattr(ctx, "was_used", False):
                raise RuntimeError(
                    "a second backward through linear_cross_entropy: the first one took its gradients. Add up the losses, or "
                    "write recompute=True with retain_graph=True (in an engine kernels=dict(loss=False))"
                )
            ctx.was_used = not ctx.settings.recompute
        if not ctx.settings.recompute:
            found = ctx.saved_tensors
            for each in found:
                if each is not None:
                    ctx.settings.kernels.multiply_(each, grad)  # in place: nobody else holds this tensor
            return *found, None, None, None
        rows, weight, bias, labels, statistics, share = ctx.saved_tensors
        gradients = HeadGradients(rows, weight, bias, ctx.needs_input_grad[:3], ctx.settings)
        chunks = LogitChunks(rows, weight, bias, labels, ctx.settings)
        share, towards = share * grad, None if entropy_grad is None else share * entropy_grad
        for at in chunks:
            chunks.write_gradient(statistics[:, at], share[at], None if towards is None else towards[at])
            gradients.add(at, chunks.operands())
        return *gradients.found(), None, None, None
