"""Vocab-parallel log-probabilities of targets, and entropies, with their gradient; logits are never gathered.

As :mod:`meshfold.tensor_parallel.layers.loss`, but a number for each token and not their sum: alignment weighs each on its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels.fuse import LazyLogits
from meshfold.mesh import Mesh, collectives
from meshfold.mesh.collectives import bind_collect, bind_leave, take_block
from meshfold.tensor_parallel.layers.waiting_head import block_of_loss
from meshfold.tensor_parallel.modes import Mode, find_mode


def log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    mesh: Mesh | None = None,
    mode: str | Mode = "1d",
    vocab_size: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Tensor:
    """Return the log-probability of each target, the same on every rank: ``.. v, m -> 1 m`` or, with entropies, ``2 m``.

    Logits that were deferred to their loss (:mod:`meshfold.kernels.fuse`) are computed in chunks with the head, and not kept.

    Args:
        logits: this rank's rows and words, in the mode's ``logits`` layout; with ``mesh`` None all of them.
        targets: ``m`` int64 for *all* rows, whole on every rank; already those that the rows predict.
        mesh: the ranks; None: logits are not split.
        mode: the layout of the logits.
        vocab_size: words in the whole vocabulary; columns beyond are padding. None: all columns.
        ignore_index: target of a row that does not count: 0.
        temperature: divides the logits.
        entropy: find the entropies of the rows too, in nats.
    """
    words: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    if mesh is not None:
        layout = find_mode(mode).layout("logits")
        rows, words = tuple(layout["m"]), tuple(layout["v"])
    columns = logits.shape[-1]
    start = mesh.index(*words) * columns if mesh is not None else 0
    size = vocab_size if vocab_size is not None else columns
    valid = min(max(size - start, 0), columns)
    found: Tensor | None = None
    if isinstance(logits, LazyLogits):
        split, shard = (rows, None) if mesh is None else block_of_loss(logits, mesh, rows, words, size)
        mine = targets if mesh is None else take_block(targets, mesh, 0, split)
        found = logits.log_probs(
            mine, ignore_index=ignore_index, temperature=temperature, entropy=entropy, vocabulary=shard
        )
        if found is not None:
            return found if mesh is None else bind_collect(mesh, 1, split)(found)
    mine = targets if mesh is None else take_block(targets, mesh, 0, rows)
    flat = logits.reshape(-1, columns)[:, :valid]
    flat = (flat if flat.dtype == torch.float64 else flat.float()) / temperature
    found = _of_logits(flat, mine, start, mesh, words, ignore_index, entropy)
    return found if mesh is None else bind_collect(mesh, 1, rows)(found)


def _of_logits(
    logits: Tensor,
    targets: Tensor,
    start: int,
    mesh: Mesh | None,
    words: tuple[str, ...],
    ignore_index: int,
    entropy: bool,
) -> Tensor:
    """Return the same from logits ``m v`` of this rank's words, which begin at ``start``."""
    m = len(logits)
    top = logits.detach().max(-1).values if logits.shape[1] else logits.new_full((m,), float("-inf"))
    if mesh is not None:
        top = collectives.all_reduce(top, mesh.group(*words), "max")
    counts, place = targets != ignore_index, targets - start
    here = counts & (place >= 0) & (place < logits.shape[1])
    shifted = logits - top[:, None]
    exponentials = shifted.exp()
    chosen = logits.new_zeros(m)
    if logits.shape[1]:
        chosen = torch.where(here, shifted.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0], 0.0)
    sums = [exponentials.sum(-1), chosen]
    if entropy:
        sums.append((exponentials * shifted).sum(-1))
    added = torch.stack(sums)
    if mesh is not None:
        added = bind_leave(mesh, words)(added)
    log_sum = added[0].log()
    found = [added[1] - log_sum]
    if entropy:
        found.append(log_sum - added[2] / added[0])
    return torch.where(counts, torch.stack(found), 0.0)
