"""Softmax cross entropy: of whole logits, and in pieces for a vocabulary that is split over ranks.

Per row, with z the logits over V words, m their maximum and s = sum(exp(z - m)), so that lse = m + log(s)::

    loss    = (1 - ls) * (lse - z[label]) + ls * (lse - mean(z)) + zl * lse**2
    dlogits = g * (softmax(z) * (1 + 2 * zl * lse) - (1 - ls) * onehot(label) - ls / V)

with ls the label smoothing and zl the weight of the z-loss. Computed in float32 (float64 for float64); dlogits is
rounded once to the dtype of the logits. The kernels of :mod:`meshfold.kernels.linear_cross_entropy` take z from scaled and
capped logits, and find the entropy of softmax(z) as well; :class:`Terms` has what they need to know.

**Split vocabulary.** A rank holds the columns ``vocab_start`` onwards; the first ``vocab_valid`` of them are words. The rest is
padding: it does not count and gets a gradient of zero. One all-reduce MAX, one fused all-reduce SUM, and no communication in the
backward::

    m    = all_reduce_max(local_max(logits, valid))
    sums = all_reduce_sum(sum_exp_and_target(logits, m, labels, start, valid, logit_sum=ls > 0))
    loss = loss_per_row(m, sums, ls, zl, V)
    dlogits = cross_entropy_backward(logits, m, sums[0], labels, start, g, ls, zl, V, valid)

A row to be ignored has g = 0 and any label outside the vocabulary. Sources: Shoeybi et al., "Megatron-LM", 2019,
section 3 (the split loss); Szegedy et al., 2016 (label smoothing); Chowdhery et al., "PaLM", 2022 (z-loss).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.functions import once_differentiable
from meshfold.kernels.inputs import as_rows, compute_dtype, contiguous_like


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Words of the logits' columns, and settings of the loss.

    Attributes:
        start: number of the first column's word.
        valid: number of columns that are words, the rest being padding.
        vocab_size: words in the whole vocabulary.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        z_loss: weight of lse**2.
        scale: factor of the logits.
        softcap: bound of the scaled logits, ``softcap * tanh(scale * logits / softcap)``; 0 for none.
    """

    start: int
    valid: int
    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0
    softcap: float = 0.0

    @property
    def smooths(self) -> bool:
        """Return True if the loss needs the sum of a row's logits."""
        return self.label_smoothing != 0.0


@dataclass(frozen=True, kw_only=True)
class LossKernels:
    """The implementations chosen by a forward on ``x``, which its backward also uses."""

    sum_rows: Callable[..., tuple[Tensor, Tensor]]
    gradient: Callable[..., None]
    write_losses_and_gradient: Callable[..., Tensor]
    multiply_: Callable[[Tensor, Tensor], None]

    @classmethod
    def of(cls, x: Tensor) -> LossKernels:
        """Return the kernels for logits in the dtype and on the device of ``x``."""
        return cls(
            sum_rows=dispatch.twin(sum_rows, x),
            gradient=dispatch.twin(gradient, x),
            write_losses_and_gradient=dispatch.twin(write_losses_and_gradient, x),
            multiply_=dispatch.twin(multiply_, x),
        )


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """Return the cross entropy of every row: ``... v, ... -> ...``, float32 (float64 for float64).

    Args:
        logits: rows of v logits.
        labels: word numbers in [0, v), int64, or ``ignore_index``.
        ignore_index: label of rows whose loss and gradient are 0.
        label_smoothing: share of the target that is spread evenly over the v words.
        z_loss: weight of lse**2.
        inplace_backward: let the backward overwrite ``logits`` with their gradient. For logits that nothing else reads, such as the
            output of a head whose backward does not need them.

    Raises:
        ValueError: if there is not one label a row.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must have one number a row, shape {list(logits.shape[:-1])}; got {list(labels.shape)}"
        )
    if torch.compiler.is_compiling():
        return _plain_cross_entropy(logits, labels, ignore_index, label_smoothing, z_loss)
    loss: Tensor = _CrossEntropy.apply(logits, labels, ignore_index, label_smoothing, z_loss, inplace_backward)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        inplace: bool,
    ) -> Tensor:
        ctx.gradient = dispatch.twin(gradient, logits)
        size = logits.shape[-1]
        terms = Terms(start=0, valid=size, vocab_size=size, label_smoothing=label_smoothing, z_loss=z_loss)
        row_max, sums = dispatch.twin(sum_rows, logits)(as_rows(logits), None, labels.reshape(-1), terms, terms.smooths)
        loss = loss_per_row(row_max, sums, label_smoothing, z_loss, size).view(labels.shape)
        ignored = labels == ignore_index
        ctx.save_for_backward(logits, labels, row_max, sums[0], ignored)
        ctx.terms, ctx.inplace = terms, inplace
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, labels, row_max, sum_exp, ignored = ctx.saved_tensors
        rows = (row_max, sum_exp, labels, grad.masked_fill(ignored, 0.0))
        dlogits = _write_gradient(ctx.gradient, logits, *rows, ctx.terms, ctx.inplace)
        return dlogits, None, None, None, None, None


def local_max(logits: Tensor, vocab_valid: int | None = None) -> Tensor:
    """Return the largest logit of every row on this rank: ``... v -> ...``, float32 (float64); -inf without any word.

    Args:
        logits: local columns of the logits.
        vocab_valid: number of columns that are words, the rest being padding; None for all.
    """
    return dispatch.piece(max_of_rows, logits)(as_rows(logits), _valid(logits, vocab_valid)).reshape(logits.shape[:-1])


def sum_exp_and_target(
    logits: Tensor,
    row_max: Tensor,
    labels: Tensor,
    vocab_start: int,
    vocab_valid: int | None = None,
    logit_sum: bool = False,
) -> Tensor:
    """Return a rank's sums for the loss of every row, stacked for one all-reduce: ``... v, ..., ... -> (2 or 3) ...``.

    Args:
        logits: local columns of the logits.
        row_max: the row's maximum over all ranks, float32 (float64).
        labels: global word numbers, int64; labels of other ranks or of no rank are ignored.
        vocab_start: global number of the first local column.
        vocab_valid: number of local columns that are words; None for all.
        logit_sum: add the third row, which label smoothing needs.

    Returns:
        [sum of exp(logit - row_max), the label's logit or 0 if it is not here, sum of logits], float32 (float64).
    """
    shape = logits.shape[:-1]
    if labels.shape != shape:
        raise ValueError(f"labels must have one number a row, shape {list(shape)}; got {list(labels.shape)}")
    run = dispatch.piece(sum_rows, logits, row_max)
    terms = Terms(start=vocab_start, valid=_valid(logits, vocab_valid), vocab_size=0)
    _, sums = run(as_rows(logits), row_max.reshape(-1), labels.reshape(-1), terms, logit_sum)
    return sums.reshape(sums.shape[0], *shape)


def loss_per_row(
    row_max: Tensor, sums: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0, vocab_size: int = 0
) -> Tensor:
    """Return the loss of every row from its maximum and its sums over all ranks: ``..., (2 or 3) ... -> ...``.

    Plain torch on one number a row. The value for a row without a label is arbitrary.

    Args:
        row_max: maximum over the whole vocabulary.
        sums: :func:`sum_exp_and_target` added up over all ranks; three rows if ``label_smoothing`` is not 0.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        z_loss: weight of lse**2.
        vocab_size: words in the whole vocabulary; only label smoothing needs it.
    """
    lse = row_max + sums[0].log()
    loss = lse - sums[1]
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (lse - sums[2] / vocab_size)
    return loss + z_loss * lse.square() if z_loss else loss


def cross_entropy_backward(
    logits: Tensor,
    row_max: Tensor,
    sum_exp: Tensor,
    labels: Tensor,
    vocab_start: int,
    grad_per_row: Tensor,
    label_smoothing: float,
    z_loss: float,
    vocab_size: int,
    vocab_valid: int | None = None,
    inplace: bool = False,
) -> Tensor:
    """Return the gradient of the local logits: ``... v -> ... v``; needs no communication.

    Args:
        logits: local columns of the logits, as in the forward.
        row_max, sum_exp: ``...``, over the whole vocabulary.
        labels: ``...``, global word numbers, int64.
        vocab_start: global number of the first local column.
        grad_per_row: ``...``, the gradient of every row's loss; 0 for a row to be ignored.
        label_smoothing, z_loss, vocab_size: as in :func:`loss_per_row`.
        vocab_valid: number of local columns that are words, the rest get 0; None for all.
        inplace: overwrite ``logits`` with the gradient, which saves a tensor of their size.

    Returns:
        dlogits in the dtype of ``logits``; ``logits`` itself if ``inplace``.
    """
    run = dispatch.piece(gradient, logits, row_max, sum_exp, grad_per_row)
    terms = Terms(
        start=vocab_start,
        valid=_valid(logits, vocab_valid),
        vocab_size=vocab_size,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return _write_gradient(run, logits, row_max, sum_exp, labels, grad_per_row, terms, inplace)


def _write_gradient(
    run: Callable[..., None],
    logits: Tensor,
    row_max: Tensor,
    sum_exp: Tensor,
    labels: Tensor,
    grad: Tensor,
    terms: Terms,
    inplace: bool,
) -> Tensor:
    """Return :func:`cross_entropy_backward`, computed by the given function."""
    rows = as_rows(logits)
    # Inductor reuses the memory by itself, and a compiled graph must not change what it saved.
    inplace = inplace and not torch.compiler.is_compiling()
    out = rows if inplace else contiguous_like(rows)
    row_max, sum_exp, labels, grad = (t.reshape(-1) for t in (row_max, sum_exp, labels, grad))
    run(rows, row_max, sum_exp, labels, grad, terms, out)
    if not inplace:
        return out.reshape(logits.shape)
    if rows.data_ptr() != logits.data_ptr():
        logits.copy_(rows.view(logits.shape))
    # Autograd does not see the kernel's writes; a second backward through these logits must fail.
    torch.autograd.graph.increment_version(logits)
    return logits


def _valid(logits: Tensor, vocab_valid: int | None) -> int:
    columns = logits.shape[-1]
    if vocab_valid is None:
        return columns
    if not 0 <= vocab_valid <= columns:
        raise ValueError(f"vocab_valid is {vocab_valid}, but there are {columns} local columns: it must lie between")
    return vocab_valid


# The reference in plain torch: it defines every result and the signatures of the Triton version. Logits are ``m v`` with
# contiguous rows.


def _plain_cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """``... v, ... -> ...``, differentiable."""
    wide = logits.to(compute_dtype(logits))
    lse = wide.logsumexp(-1)
    ignored = labels == ignore_index
    target = wide.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - target
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (lse - wide.mean(-1))
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss.masked_fill(ignored, 0.0)


def max_of_rows(logits: Tensor, valid: int) -> Tensor:
    """``m v -> m``: -inf where there is no valid column."""
    if valid == 0:
        return logits.new_full((logits.shape[0],), float("-inf"), dtype=compute_dtype(logits))
    return logits[:, :valid].amax(1).to(compute_dtype(logits))


def sum_rows(
    logits: Tensor,
    row_max: Tensor | None,
    labels: Tensor,
    terms: Terms,
    logit_sum: bool = False,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """``m v, m, m -> m, (2 to 4) m``: the maximum (found, if not given) and the sums about it.

    Returns:
        The maximum m of z, and: the sum of e = exp(z - m), the label's z or 0, with ``logit_sum`` the sum of z, with
        ``entropy`` the sum of e * (z - m).
    """
    wide = _values(logits, terms)
    if row_max is None:
        row_max = max_of_rows(wide, terms.valid)
    # A row of only -inf has no finite maximum to subtract, but its sum of exponentials is still zero.
    finite = row_max.masked_fill(row_max == float("-inf"), 0.0)
    exponentials = (wide - finite.unsqueeze(1)).exp_()
    place, here = _place(labels, terms)
    if terms.valid:
        target = wide.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
    else:
        target = torch.zeros_like(row_max)
    rows = [exponentials.sum(1), target]
    if logit_sum:
        rows.append(wide.sum(1))
    if entropy:
        rows.append(torch.xlogy(exponentials, exponentials).sum(1))  # 0 for -inf
    return row_max, torch.stack(rows)


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
    """Write dlogits ``m v`` into ``out``, which may be ``logits`` itself.

    Args:
        grad: ``m``, the gradient of every row's loss.
        entropy, entropy_grad: ``m``, the entropy H of every row and its gradient h, which adds ``-h p (log p + H)`` to dz.
    """
    grad = grad.to(row_max.dtype)
    wide, words = _values(logits, terms), out[:, : terms.valid]
    slope = 1.0 - (wide / terms.softcap).square() if terms.softcap else None
    # Without rounding the value is computed in place; torch.compile does that by itself.
    direct = out.dtype is row_max.dtype and not torch.compiler.is_compiling()
    value = torch.sub(wide, row_max.unsqueeze(1), out=words if direct else None).exp_()
    factor = grad * (1.0 + 2.0 * terms.z_loss * (row_max + sum_exp.log()))
    if entropy is not None and entropy_grad is not None:
        value /= sum_exp.unsqueeze(1)
        surprise = torch.xlogy(value, value) * entropy_grad.unsqueeze(1)
        value *= (factor - entropy_grad * entropy).unsqueeze(1)
        value -= surprise
    else:
        value *= (factor / sum_exp).unsqueeze(1)
    if terms.label_smoothing:
        value -= (grad * (terms.label_smoothing / terms.vocab_size)).unsqueeze(1)
    if terms.valid:
        place, here = _place(labels, terms)
        value.scatter_add_(1, place.unsqueeze(1), (grad * here * (terms.label_smoothing - 1.0)).unsqueeze(1))
    if slope is not None:
        value *= slope
    if terms.scale != 1.0:
        value *= terms.scale
    if not direct:
        words.copy_(value)
    out[:, terms.valid :].zero_()


def write_losses_and_gradient(logits: Tensor, labels: Tensor, share: Tensor, terms: Terms) -> Tensor:
    """Overwrite logits of a whole vocabulary with the gradient of ``(share * loss).sum()``; return the losses ``m``.

    Between the rows of ``logits`` there may be padding, which may be overwritten too.
    """
    row_max, sums = sum_rows(logits, None, labels, terms, terms.smooths)
    gradient(logits, row_max, sums[0], labels, share, terms, logits)
    return loss_per_row(row_max, sums, terms.label_smoothing, terms.z_loss, terms.vocab_size)


def multiply_(x: Tensor, factor: Tensor) -> None:
    """Multiply by a number on the device, in place. Triton only reads the number if it is 1."""
    x.mul_(factor)


def _values(logits: Tensor, terms: Terms) -> Tensor:
    """Return z ``m valid``: the logits, scaled and capped, in the dtype of the computation; may be a view of ``logits``."""
    wide = logits[:, : terms.valid].to(compute_dtype(logits))
    if terms.softcap:
        return (wide * (terms.scale / terms.softcap)).tanh_().mul_(terms.softcap)
    return wide if terms.scale == 1.0 else wide * terms.scale


def _place(labels: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Return each label's column on this rank (0 if it is elsewhere), and a mask of the labels that are here."""
    place = labels - terms.start
    here = (place >= 0) & (place < terms.valid)
    return place.masked_fill(~here, 0), here
