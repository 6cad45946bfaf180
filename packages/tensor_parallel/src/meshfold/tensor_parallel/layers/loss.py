"""Vocab-parallel cross entropy.

One all-reduce of the rows' maxima and one of their sums over the axes that split the vocabulary; backward needs no
communication. Logits are never gathered.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold import kernels
from meshfold.mesh import LayoutError, Mesh, collectives
from meshfold.mesh.primitives import leave, take_block
from meshfold.tensor_parallel.modes import Mode, find_mode
from meshfold.tensor_parallel.sizes import vocabulary_multiple


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
    """Cross entropy of logits that lie as the mode's ``logits``, the same number on every rank of the mesh.

    Args:
        logits: ``.. v``, this rank's rows and columns; columns beyond ``vocab_size`` are padding.
        labels: ``..`` int64 for *all* tokens, whole on every rank: the shape of the unsplit logits' rows.
        vocab_size: words in the whole vocabulary.
        ignore_index: label of a token that does not count.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: weight of log²(Z), added to each token's loss (arXiv 2204.02311, section 5).
        reduction: ``"mean"`` over the tokens that count, or ``"sum"``.

    Raises:
        LayoutError: if the mesh lacks an axis of the mode, the logits are not this rank's block, or the labels do not fit
            them, or for another reduction.
    """
    found = find_mode(mode)
    mesh.require(*found.axes, what=f"mode {found.name!r}")
    layout = found.layout("logits")
    if reduction not in ("mean", "sum"):
        raise LayoutError(
            f"reduction={reduction!r}: a loss is the 'mean' over the tokens that count, or their 'sum'"
        )
    columns, blocks, multiple = logits.shape[-1], mesh.size(*layout["v"]), vocabulary_multiple(found, mesh)
    if (
        columns * blocks < vocab_size
        or columns == vocab_size != math.ceil(vocab_size / multiple) * multiple // blocks
    ):
        raise LayoutError(
            f"logits with {columns} columns are not a block of {vocab_size} words over {', '.join(layout['v']) or 'no axis'} "
            f"({blocks} blocks): give what the head returned, split over the vocabulary"
        )
    rows = logits.reshape(-1, logits.shape[-1])
    flat = labels.reshape(-1)
    if flat.shape[0] != rows.shape[0] * mesh.size(*layout["m"]):
        raise LayoutError(
            f"{flat.shape[0]} labels for {rows.shape[0]} local rows of logits, split over {mesh.size(*layout['m'])} blocks: "
            f"give the labels of all {rows.shape[0] * mesh.size(*layout['m'])} tokens on every rank"
        )
    mine = take_block(flat, mesh, 0, layout["m"])
    per_row = _VocabParallel.apply(  # type: ignore[no-untyped-call]
        rows, mine, mesh, layout["v"], vocab_size, ignore_index, label_smoothing, z_loss
    )
    total = leave(per_row.sum(), mesh, layout["m"])
    if reduction == "sum":
        return total
    return total / (flat != ignore_index).sum()


class CausalLMLoss(nn.Module):
    """Next-token loss of logits split over tokens and vocabulary; labels come whole and are shifted here."""

    causal_lm_loss = True

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
        if shift_labels is None and labels is None:
            raise LayoutError("a loss needs labels, or shift_labels")
        shifted = (
            F.pad(labels, (0, 1), value=self.ignore_index)[..., 1:] if shift_labels is None else shift_labels
        )  # type: ignore[arg-type]
        loss = cross_entropy(
            logits, shifted, mesh=self.mesh, mode=self.mode, vocab_size=self.vocab_size, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, reduction="sum",
        )  # fmt: skip
        return loss / (
            (shifted != self.ignore_index).sum().clamp(min=1)
            if num_items_in_batch is None
            else num_items_in_batch
        )

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, mode={self.mode.name}, label_smoothing={self.label_smoothing}, z_loss={self.z_loss}"


class _VocabParallel(torch.autograd.Function):
    """Per-row loss ``m``, zero for ignored rows, from local logits ``m v``."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        mesh: Mesh,
        axes: tuple[str, ...],
        vocab_size: int,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
    ) -> Tensor:
        columns = logits.shape[-1]
        start = mesh.index(*axes) * columns
        valid = min(max(vocab_size - start, 0), columns)
        group = mesh.group(*axes)
        row_max = collectives.all_reduce(kernels.local_max(logits, valid), group, "max")
        sums = kernels.sum_exp_and_target(logits, row_max, labels, start, valid, label_smoothing != 0.0)
        sums = collectives.all_reduce(sums, group)
        counts = labels != ignore_index
        loss = kernels.loss_per_row(row_max, sums, label_smoothing, z_loss, vocab_size)
        ctx.save_for_backward(logits, labels, row_max, sums[0], counts)
        ctx.settings = (start, valid, label_smoothing, z_loss, vocab_size)
        return torch.where(counts, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, labels, row_max, sum_exp, counts = ctx.saved_tensors
        start, valid, label_smoothing, z_loss, vocab_size = ctx.settings
        per_row = torch.where(counts, grad, torch.zeros((), dtype=grad.dtype, device=grad.device))
        dlogits = kernels.cross_entropy_backward(
            logits, row_max, sum_exp, labels, start, per_row, label_smoothing, z_loss, vocab_size, valid
        )
        return dlogits, None, None, None, None, None, None, None
