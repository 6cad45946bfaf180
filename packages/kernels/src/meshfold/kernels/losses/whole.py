"""Cross entropy of logits that are whole on this rank, with autograd: the pieces with nothing in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.losses import reference
from meshfold.kernels.losses.interface import LossKernels
from meshfold.kernels.losses.pieces import loss_per_row, write_gradient
from meshfold.kernels.rows import as_rows

_reference: LossKernels = reference


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """Cross entropy of every row: ``... v, ... -> ...``, float32 (float64 for float64).

    Args:
        logits: rows of v logits.
        labels: word numbers in [0, v), int64, or ``ignore_index``.
        ignore_index: label of rows whose loss and gradient are 0.
        label_smoothing: share of the target that is spread evenly over the v words.
        z_loss: weight of lse**2.
        inplace_backward: let the backward overwrite ``logits`` with their gradient. For logits that nobody else
            reads, such as the output of a head whose backward does not need them.

    Raises:
        ValueError: if there is not one label a row.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must have one number a row, shape {list(logits.shape[:-1])}; got {list(labels.shape)}"
        )
    if torch.compiler.is_compiling():
        return reference.cross_entropy(logits, labels, ignore_index, label_smoothing, z_loss)
    loss: Tensor = _CrossEntropy.apply(
        logits, labels, ignore_index, label_smoothing, z_loss, inplace_backward
    )
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
        ctx.kernels = dispatch.twin("losses", _reference, logits)
        vocab_size = logits.shape[-1]
        row_max, sums = ctx.kernels.sums(
            as_rows(logits), None, labels.reshape(-1), 0, vocab_size, label_smoothing != 0.0
        )
        loss = loss_per_row(row_max, sums, label_smoothing, z_loss, vocab_size).view(labels.shape)
        ignored = labels == ignore_index
        ctx.save_for_backward(logits, labels, row_max, sums[0], ignored)
        ctx.label_smoothing, ctx.z_loss, ctx.inplace = label_smoothing, z_loss, inplace
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, labels, row_max, sum_exp, ignored = ctx.saved_tensors
        columns = logits.shape[-1]
        arguments = (row_max, sum_exp, labels, 0, columns, grad.masked_fill(ignored, 0.0))
        settings = (ctx.label_smoothing, ctx.z_loss, columns, ctx.inplace)
        dlogits = write_gradient(ctx.kernels, logits, *arguments, *settings)
        return dlogits, None, None, None, None, None
