"""The pieces of a cross entropy whose vocabulary is split over ranks: no communication here, and no autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.losses import reference
from meshfold.kernels.losses.interface import LossKernels
from meshfold.kernels.rows import as_rows

_reference: LossKernels = reference


def local_max(logits: Tensor, vocab_valid: int | None = None) -> Tensor:
    """The largest logit of every row on this rank: ``... v -> ...``, float32 (float64); -inf without any word.

    Args:
        logits: local columns of the logits.
        vocab_valid: how many of them are words, the rest being padding; None for all.
    """
    kernels = dispatch.piece("losses", _reference, logits)
    return kernels.local_max(as_rows(logits), _valid(logits, vocab_valid)).reshape(logits.shape[:-1])


def sum_exp_and_target(
    logits: Tensor,
    row_max: Tensor,
    labels: Tensor,
    vocab_start: int,
    vocab_valid: int | None = None,
    logit_sum: bool = False,
) -> Tensor:
    """What a rank adds to the loss of every row, stacked for one all-reduce: ``... v, ..., ... -> (2 or 3) ...``.

    Args:
        logits: local columns of the logits.
        row_max: the row's maximum over all ranks, float32 (float64).
        labels: global word numbers, int64; one that lies elsewhere or nowhere counts as absent.
        vocab_start: global number of the first local column.
        vocab_valid: how many local columns are words; None for all.
        logit_sum: whether to add the third row, which label smoothing needs.

    Returns:
        [sum of exp(logit - row_max), the label's logit or 0 if it is not here, sum of logits], float32 (float64).
    """
    shape = logits.shape[:-1]
    if labels.shape != shape:
        raise ValueError(f"labels must have one number a row, shape {list(shape)}; got {list(labels.shape)}")
    kernels = dispatch.piece("losses", _reference, logits, row_max)
    valid = _valid(logits, vocab_valid)
    rows, labels = as_rows(logits), labels.reshape(-1)
    _, sums = kernels.sums(rows, row_max.reshape(-1), labels, vocab_start, valid, logit_sum)
    return sums.reshape(sums.shape[0], *shape)


def loss_per_row(
    row_max: Tensor, sums: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0, vocab_size: int = 0
) -> Tensor:
    """The loss of every row from its maximum and its sums over all ranks: ``..., (2 or 3) ... -> ...``.

    Plain torch on one number a row. What it gives for a row without a label (to be ignored) means nothing.

    Args:
        row_max: maximum over the whole vocabulary.
        sums: :func:`sum_exp_and_target` added up over all ranks; three rows if ``label_smoothing`` is not 0.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        z_loss: weight of lse**2.
        vocab_size: words in the whole vocabulary; needed for label smoothing alone.
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
    """The gradient of the local logits: ``... v -> ... v``; needs no communication.

    Args:
        logits: local columns of the logits, as in the forward.
        row_max, sum_exp: ``...``, over the whole vocabulary.
        labels: ``...``, global word numbers, int64.
        vocab_start: global number of the first local column.
        grad_per_row: ``...``, the gradient of every row's loss; 0 for a row to be ignored.
        label_smoothing, z_loss, vocab_size: as in :func:`loss_per_row`.
        vocab_valid: how many local columns are words, the rest getting 0; None for all.
        inplace: overwrite ``logits`` with the gradient, which saves a tensor of their size.

    Returns:
        dlogits in the dtype of ``logits``; ``logits`` itself if ``inplace``.
    """
    kernels = dispatch.piece("losses", _reference, logits, row_max, sum_exp, grad_per_row)
    valid = _valid(logits, vocab_valid)
    return write_gradient(
        kernels,
        logits,
        row_max,
        sum_exp,
        labels,
        vocab_start,
        valid,
        grad_per_row,
        label_smoothing,
        z_loss,
        vocab_size,
        inplace,
    )


def write_gradient(
    kernels: LossKernels,
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
    inplace: bool,
) -> Tensor:
    """:func:`cross_entropy_backward` by the given twin."""
    rows = as_rows(logits)
    # Inductor sees for itself that it may reuse the memory, and a compiled graph must not change what it saved.
    inplace = inplace and not torch.compiler.is_compiling()
    out = rows if inplace else torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    row_max, sum_exp, labels, grad = (t.reshape(-1) for t in (row_max, sum_exp, labels, grad))
    kernels.gradient(
        rows, row_max, sum_exp, labels, start, valid, grad, label_smoothing, z_loss, vocab_size, out
    )
    if not inplace:
        return out.reshape(logits.shape)
    if rows.data_ptr() != logits.data_ptr():
        logits.copy_(rows.view(logits.shape))
    # Autograd does not see what a kernel writes: a second backward through these logits must be refused.
    torch.autograd.graph.increment_version(logits)
    return logits


def _valid(logits: Tensor, vocab_valid: int | None) -> int:
    columns = logits.shape[-1]
    if vocab_valid is None:
        return columns
    if not 0 <= vocab_valid <= columns:
        raise ValueError(
            f"vocab_valid is {vocab_valid}, but there are {columns} local columns: it must lie between"
        )
    return vocab_valid
