"""Vocab-parallel cross entropy.

One all-reduce of the rows' maxima and one of their sums over the axes that split the vocabulary; backward needs no
communication. Logits are never gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold import kernels
from meshfold.kernels.fuse import LazyLogits
from meshfold.mesh import LayoutError, Mesh, collectives
from meshfold.mesh.collectives import bind_leave, take_block
from meshfold.tensor_parallel.layers import vocabulary
from meshfold.tensor_parallel.layers.base import OnMesh, without_autocast
from meshfold.tensor_parallel.layers.vocabulary import checked
from meshfold.tensor_parallel.layers.waiting_head import block_of_loss
from meshfold.tensor_parallel.modes import Mode, find_mode, vocabulary_multiple

SummedLoss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    mesh: Mesh,
    mode: str | Mode = "1d",
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy of logits in the mode's ``logits`` layout, the same number on every rank of the mesh.

    Args:
        logits: ``.. v``, this rank's rows and columns; columns beyond ``vocab_size`` are padding.
        labels: ``..`` int64 for *all* tokens, whole on every rank: the shape of the unsplit logits' rows.
        vocab_size: words in the whole vocabulary.
        ignore_index: label of a token that does not count.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: weight of log²(Z), added to each token's loss (arXiv 2204.02311, section 5).
        reduction: ``"mean"`` over the tokens that count, or ``"sum"``.

    Raises:
        LayoutError: if the mesh lacks an axis of the mode, the logits are not this rank's block, or the labels do not
            fit them, or for another reduction.
        TokenError: on the CPU, for a label that is neither a word nor ``ignore_index``; on a GPU an assertion on the device fails.
    """
    if reduction not in ("mean", "sum"):
        raise LayoutError(f"reduction={reduction!r}: use 'mean' or 'sum' over the tokens that count")
    total = bind_cross_entropy(mesh, find_mode(mode), vocab_size, ignore_index, label_smoothing, z_loss)(logits, labels)
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def bind_cross_entropy(
    mesh: Mesh,
    mode: Mode,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> SummedLoss:
    """Bind :func:`cross_entropy`, summed over tokens, as a function of logits and labels that torch.compile can trace."""
    mesh.require(*mode.axes, what=f"mode {mode.name!r}")
    layout = mode.layout("logits")
    multiple = vocabulary_multiple(mode, mesh)
    settings = (vocab_size, ignore_index, label_smoothing, z_loss)
    key = ("cross entropy", layout["m"], layout["v"], multiple, *settings)
    return mesh.once(key, lambda: _make(mesh, layout["m"], layout["v"], multiple, *settings))


def _make(
    mesh: Mesh,
    tokens: tuple[str, ...],
    words: tuple[str, ...],
    multiple: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> SummedLoss:
    shares, blocks = mesh.size(*tokens), mesh.size(*words)
    padded = math.ceil(vocab_size / multiple) * multiple // blocks
    mesh.prepare(*words)
    vocabulary.prepare()
    add_up = bind_leave(mesh, tokens)
    of_rows = _make_function(mesh, words, vocab_size, ignore_index, label_smoothing, z_loss)

    def with_head(logits: LazyLogits, labels: Tensor) -> Tensor:
        """Return the summed loss of deferred logits and all labels."""
        rows, shard = block_of_loss(logits, mesh, tokens, words, vocab_size)
        found = logits.loss(
            take_block(labels, mesh, 0, rows),
            ignore_index=ignore_index,
            reduction="sum",
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            vocabulary=shard,
        )
        return bind_leave(mesh, rows)(found)

    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        flat, columns, count = labels.reshape(-1), logits.shape[-1], logits.shape[:-1].numel()
        if columns * blocks < vocab_size or columns == vocab_size != padded:
            raise LayoutError(
                f"logits with {columns} columns are not a block of {vocab_size} words over {', '.join(words) or 'no axis'} "
                f"({blocks} blocks): give what the head returned, split over the vocabulary"
            )
        if flat.shape[0] != count * shares:
            raise LayoutError(
                f"{flat.shape[0]} labels for {count} local rows of logits, split over {shares} blocks: "
                f"give the labels of all {count * shares} tokens on every rank"
            )
        flat = checked(flat, vocab_size, "label", ignore_index)
        if isinstance(logits, LazyLogits):
            return with_head(logits, flat)
        mine = take_block(flat, mesh, 0, tokens)
        rows = logits.reshape(-1, columns)
        with without_autocast(rows):
            return add_up(of_rows.apply(rows, mine).sum())

    return summed


def _make_function(
    mesh: Mesh, words: tuple[str, ...], vocab_size: int, ignore_index: int, label_smoothing: float, z_loss: float
) -> type[torch.autograd.Function]:
    """Return the loss of rows of logits whose vocabulary is split, with its gradient."""

    class VocabParallel(torch.autograd.Function):
        """Per-row loss ``m``, zero for ignored rows, from local logits ``m v``."""

        @staticmethod
        def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
            columns, group = logits.shape[-1], mesh.group(*words)
            start = mesh.index(*words) * columns
            valid = min(max(vocab_size - start, 0), columns)
            row_max = collectives.all_reduce(kernels.local_max(logits, valid), group, "max")
            sums = kernels.sum_exp_and_target(logits, row_max, labels, start, valid, label_smoothing != 0.0)
            sums = collectives.all_reduce(sums, group)
            loss = kernels.loss_per_row(row_max, sums, label_smoothing, z_loss, vocab_size)
            ignored = labels == ignore_index
            ctx.save_for_backward(logits, labels, row_max, sums[0], ignored)
            ctx.place = (start, valid)
            return loss.masked_fill(ignored, 0.0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            logits, labels, row_max, sum_exp, ignored = ctx.saved_tensors
            start, valid = ctx.place
            dlogits = kernels.cross_entropy_backward(
                logits,
                row_max,
                sum_exp,
                labels,
                start,
                grad.masked_fill(ignored, 0.0),
                label_smoothing,
                z_loss,
                vocab_size,
                valid,
            )
            return dlogits, None

    return VocabParallel


class CausalLMLoss(OnMesh, nn.Module):
    """Next-token loss of logits split over tokens and vocabulary; labels come whole and are shifted here.

    Attributes:
        shifts: False: labels come shifted already, as where sequences are split over ranks.
    """

    causal_lm_loss = True
    shifts = True

    def __init__(
        self,
        mesh: Mesh,
        mode: Mode,
        vocab_size: int,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.mesh, self.mode, self.vocab_size = mesh, mode, vocab_size
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self._summed = bind_cross_entropy(mesh, mode, vocab_size, ignore_index, label_smoothing, z_loss)

    def forward(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        *,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """``.. v`` local, ``b s`` whole -> scalar: the mean over the labels that count, 0 where none does.

        Args:
            num_items_in_batch: divide the sum by this instead of the number of tokens that count.
            shift_labels: labels that are shifted already.
        """
        if labels is not None and shift_labels is None and not self.shifts:
            shift_labels = labels
        if labels is not None and shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=self.ignore_index)[..., 1:]
        if shift_labels is None:
            raise LayoutError("a loss needs labels, or shift_labels")
        total = self._summed(logits, shift_labels)
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != self.ignore_index).sum().clamp(min=1)
        return total / num_items_in_batch

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, mode={self.mode.name}, label_smoothing={self.label_smoothing}, z_loss={self.z_loss}"
