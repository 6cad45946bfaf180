"""Shards of sequences: each rank's tokens of a whole sequence, and its share of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.mesh import Mesh, collectives
from meshfold.mesh.collectives import collect
from meshfold.mesh.model_io import IGNORE_INDEX
from meshfold.sequence.sharding import check_documents, sequence_mode, sequence_sharding

ModeName = str | Callable[..., object]


def shard_sequence(
    x: Tensor, mesh: Mesh, mode: ModeName = "ring", *, dim: int = 1, order: str | None = None, pad: float = 0
) -> Tensor:
    """Return this rank's tokens of a whole sequence: ``b length .. -> b local ..``. No communication.

    Args:
        x: tokens, labels or hidden states, the same on every rank.
        mesh: with the axis ``seq``, or ``ring`` × ``ulysses``.
        mode: as in :func:`meshfold.sequence.attention`.
        dim: the sequence dim.
        order: "zigzag" or "contiguous"; None: the mode's own.
        pad: fill value at the end of a length that does not divide evenly; -100 for labels.

    Raises:
        LayoutError: for an unknown mode or order.
    """
    found = sequence_mode(mode, mesh)
    return sequence_sharding(x.shape[dim], mesh, mode, order).shard(x, mesh.index(*found.axes), dim, pad)


def gather_sequence(
    x: Tensor,
    mesh: Mesh,
    mode: ModeName = "ring",
    *,
    length: int | None = None,
    dim: int = 1,
    order: str | None = None,
) -> Tensor:
    """Gather the whole sequence on every rank, in its order and without padding: ``b local .. -> b length ..``.

    By all-gather. Backward gives every rank its own tokens of the gradient: for a use that is the same on all ranks.

    Args:
        x: this rank's tokens.
        mesh, mode, dim, order: as they were sharded.
        length: tokens of the whole sequence; None: there is no padding.
    """
    axes = sequence_mode(mode, mesh).axes
    sharding = sequence_sharding(length or x.shape[dim] * mesh.size(*axes), mesh, mode, order)
    return sharding.join(collect(x, mesh, dim % x.dim(), axes), dim)


def positions(
    length: int,
    mesh: Mesh,
    mode: ModeName = "ring",
    *,
    order: str | None = None,
    documents: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the position in the whole sequence of each of this rank's tokens: ``local``, int64.

    Args:
        length: tokens of the whole sequence, without padding; a padded token has the position of the last one.
        mesh, mode, order: as the sequence is sharded.
        documents: cumulative lengths of packed documents; positions start again at each.
        device: of the result.
    """
    rank = mesh.index(*sequence_mode(mode, mesh).axes)
    return sequence_sharding(length, mesh, mode, order).positions(rank, documents, device)


def next_tokens(labels: Tensor, documents: Sequence[int] | None = None, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Shift the labels of a whole batch, so that each token has the next one's: ``b length -> b length``.

    A model shifts labels by one token itself, which is impossible on a shard of a sequence: shift before sharding.

    Args:
        labels: not shifted.
        documents: cumulative lengths; the last token of each has no next one.
        ignore_index: the label of a token that does not count.
    """
    moved = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    if documents is not None:
        for stop in check_documents(documents, labels.shape[1])[1:]:
            moved[:, stop - 1] = ignore_index
    return moved


def loss_share(
    logits: Tensor,
    targets: Tensor,
    mesh: Mesh,
    mode: str | Callable[..., object] = "ring",
    *,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return this rank's share of the mean cross entropy over all tokens that count; the shares of all ranks add up to it.

    So do their gradients: sum parameter gradients over the sequence axes, do not average them.

    Args:
        logits: ``... v``, of this rank's tokens.
        targets: ``...``, already moved by one token (:func:`meshfold.sequence.next_tokens`) and then sharded with
            ``pad=ignore_index``; one for each logit row.
        mesh, mode: as the sequence is sharded.
        ignore_index: the target of a token that does not count.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    wide = rows if rows.itemsize == 8 else rows.float()
    total = F.cross_entropy(wide, targets.reshape(-1), ignore_index=ignore_index, reduction="sum")
    counted = (targets != ignore_index).sum().to(total.dtype)
    return total / collectives.all_reduce(counted, mesh.group(*sequence_mode(mode, mesh).axes)).clamp(min=1)
