"""Cross entropy in plain torch, piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels.rows import compute_dtype


def cross_entropy(
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


def local_max(logits: Tensor, valid: int) -> Tensor:
    if valid == 0:
        return logits.new_full((logits.shape[0],), float("-inf"), dtype=compute_dtype(logits))
    return logits[:, :valid].amax(1).to(compute_dtype(logits))


def sums(
    logits: Tensor, row_max: Tensor | None, labels: Tensor, start: int, valid: int, logit_sum: bool
) -> tuple[Tensor, Tensor]:
    if row_max is None:
        row_max = local_max(logits, valid)
    wide = logits[:, :valid].to(row_max.dtype)
    # A row of nothing but -inf has no finite maximum to subtract; its sum of exponentials is zero all the same.
    finite = row_max.masked_fill(row_max == float("-inf"), 0.0)
    sum_exp = (wide - finite.unsqueeze(1)).exp_().sum(1)
    place, here = _place(labels, start, valid)
    if valid:
        target = logits.gather(1, place.unsqueeze(1)).squeeze(1).to(row_max.dtype)
        target = target.masked_fill(~here, 0.0)
    else:
        target = torch.zeros_like(row_max)
    rows = [sum_exp, target]
    if logit_sum:
        rows.append(wide.sum(1))
    return row_max, torch.stack(rows)


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
    grad = grad.to(row_max.dtype)
    # Where nothing has to be rounded the value is found in its place; torch.compile sees to that by itself.
    direct = out.dtype is row_max.dtype and not torch.compiler.is_compiling()
    wide, words = logits[:, :valid].to(row_max.dtype), out[:, :valid]
    value = torch.sub(wide, row_max.unsqueeze(1), out=words if direct else None).exp_()
    value *= (grad * (1.0 + 2.0 * z_loss * (row_max + sum_exp.log())) / sum_exp).unsqueeze(1)
    if label_smoothing:
        value -= (grad * (label_smoothing / vocab_size)).unsqueeze(1)
    if valid:
        place, here = _place(labels, start, valid)
        value.scatter_add_(1, place.unsqueeze(1), (grad * here * (label_smoothing - 1.0)).unsqueeze(1))
    if not direct:
        words.copy_(value)
    out[:, valid:].zero_()


def _place(labels: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor]:
    """Each label's column on this rank (0 where it has none), and whether it has one."""
    place = labels - start
    here = (place >= 0) & (place < valid)
    return place.masked_fill(~here, 0), here
